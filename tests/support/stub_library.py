"""A stub `libamd_smi.so` for the real Python binding: C generated from its own symbol list, answers from here.

The C side only moves numbers: each call that matters asks a Unix socket, whose server acts on an emulated node in the
order in which AMD's library does (root, enum, offered list, equal to current, write, errno). All other symbols exist
and answer NOT_SUPPORTED.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dieplace.emulator.node import Node
from dieplace.modes import partitions_of

# amdsmi 7.0.2 enums, as executed: compute SPX 1 .. CPX 5, memory NPSn = n.
COMPUTE = {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX", 5: "CPX"}
MEMORY = {1: "NPS1", 2: "NPS2", 4: "NPS4", 8: "NPS8"}
INVAL, NOT_SUPPORTED, NO_PERM, BUSY, SETTING_UNAVAILABLE, UNKNOWN = 1, 2, 10, 30, 55, 0xFFFFFFFF
ERRNO = {errno.EACCES: 10, errno.EPERM: 2, errno.ENOENT: 2, errno.ENODEV: 2, errno.EIO: 42, errno.ENXIO: 43,
         errno.EBUSY: 30, errno.EINVAL: 1}  # fmt: skip

HEAD = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
typedef uint32_t st;
static st ask(char *reply, size_t size, const char *format, unsigned long a, unsigned long b) {
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    char line[256]; size_t got = 0; ssize_t n;
    strncpy(to.sun_path, SOCKET_PATH, sizeof to.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) { if (fd >= 0) close(fd); return 34; }
    snprintf(line, sizeof line, format, a, b);
    if (write(fd, line, strlen(line)) < 0) { close(fd); return 34; }
    shutdown(fd, SHUT_WR);
    char text[4096];
    while (got < sizeof text - 1 && (n = read(fd, text + got, sizeof text - 1 - got)) > 0) got += n;
    text[got] = 0; close(fd);
    char *end; st status = (st)strtoul(text, &end, 10);
    if (reply && size) { snprintf(reply, size, "%s", *end == ' ' ? end + 1 : end); }
    return status;
}
static st number(uint64_t *out, const char *format, unsigned long a) {
    char text[64]; st s = ask(text, sizeof text, format, a, 0); if (!s) *out = strtoull(text, 0, 10); return s;
}
static st list(uint32_t *count, void **out, const char *format, unsigned long a) {
    char text[4000]; st s = ask(text, sizeof text, format, a, 0); uint32_t n = 0;
    for (char *p = strtok(text, " "); !s && p; p = strtok(0, " ")) { if (out) out[n] = (void *)strtoul(p, 0, 10); n++; }
    *count = n; return s;
}
st amdsmi_init(uint64_t flags) { return ask(0, 0, "init %lu", flags, 0); }
st amdsmi_shut_down(void) { return ask(0, 0, "shut_down", 0, 0); }
st amdsmi_get_socket_handles(uint32_t *n, void **out) { return list(n, out, "sockets", 0); }
st amdsmi_get_processor_handles(void *s, uint32_t *n, void **out) {
    return list(n, out, "devices %lu", (unsigned long)s); }
st amdsmi_get_gpu_device_bdf(void *h, uint64_t *bdf) { return number(bdf, "bdf %lu", (unsigned long)h); }
struct kfd { uint64_t kfd_id; uint32_t node, partition, reserved[12]; };
st amdsmi_get_gpu_kfd_info(void *h, struct kfd *out) {
    uint64_t v; st s = number(&v, "partition %lu", (unsigned long)h); memset(out, 0, sizeof *out);
    out->partition = (uint32_t)v; return s;
}
struct version { uint32_t major, minor, release; char *build; };
st amdsmi_get_lib_version(struct version *v) {
    static char text[64]; st s = ask(text, sizeof text, "version", 0, 0);
    sscanf(text, "%u.%u.%u", &v->major, &v->minor, &v->release); v->build = text; return s;
}
st amdsmi_get_gpu_compute_partition(void *h, char *out, uint32_t size) {
    return ask(out, size, "compute %lu", (unsigned long)h, 0); }
st amdsmi_get_gpu_memory_partition(void *h, char *out, uint32_t size) {
    return ask(out, size, "memory %lu", (unsigned long)h, 0); }
st amdsmi_set_gpu_compute_partition(void *h, uint32_t v) {
    return ask(0, 0, "set_compute %lu %lu", (unsigned long)h, v); }
st amdsmi_set_gpu_memory_partition(void *h, uint32_t v) { return ask(0, 0, "set_memory %lu %lu", (unsigned long)h, v); }
st amdsmi_set_gpu_accelerator_partition_profile(void *h, uint32_t v) {
    return ask(0, 0, "set_profile %lu %lu", (unsigned long)h, v); }
struct profile { uint32_t type, partitions, caps, index, resources, list[8][32], pad; uint64_t reserved[13]; };
struct resource { uint32_t index, type, each, share; uint64_t reserved[6]; };
struct config { uint32_t profiles_n, resources_n; struct resource resources[32]; uint32_t first, pad;
                struct profile profiles[32];
                uint64_t reserved[30]; };
st amdsmi_get_gpu_accelerator_partition_profile(void *h, struct profile *out, uint32_t *id) {
    uint64_t v; memset(out, 0, sizeof *out); st s = number(&v, "profile %lu", (unsigned long)h);
    if (!s) { out->type = v >> 16; out->partitions = v & 0xffff; } return s;
}
st amdsmi_get_gpu_accelerator_partition_profile_config(void *h, struct config *out) {
    char text[256]; memset(out, 0, sizeof *out); st s = ask(text, sizeof text, "config %lu", (unsigned long)h, 0);
    for (char *p = strtok(text, " "); !s && p; p = strtok(0, " ")) {
        struct profile *q = &out->profiles[out->profiles_n]; q->type = atoi(p); q->index = out->profiles_n++; }
    out->resources_n = 1; return s;
}
struct power { uint64_t socket; uint32_t now, average; uint64_t volts[3]; uint32_t limit, pad; uint64_t reserved[18]; };
st amdsmi_get_power_info(void *h, struct power *out) {
    uint64_t v; memset(out, 0, sizeof *out);
    st s = number(&v, "power %lu", (unsigned long)h); out->now = (uint32_t)v; return s;
}
struct usage { uint32_t gfx, umc, mm, reserved[13]; };
st amdsmi_get_gpu_activity(void *h, struct usage *out) {
    uint64_t v; memset(out, 0, sizeof *out);
    st s = number(&v, "activity %lu", (unsigned long)h); out->gfx = (uint32_t)v; return s;
}
"""


def symbols() -> list[str]:
    """Every name that the installed binding takes from its library at import."""
    found = importlib.util.find_spec("amdsmi")
    if found is None or found.origin is None:
        pytest.skip("the Python package amdsmi is not installed, so there is no binding to run against a stub")
    text = Path(found.origin).with_name("amdsmi_wrapper.py").read_text()
    return sorted(set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", text)))


def build(folder: Path, socket_path: Path, *, leave_out: tuple[str, ...] = ()) -> Path:
    """Compile `folder`/lib/libamd_smi.so and return `folder` as a ROCm path; skips where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here to build the stub of AMD's library with")
    own = set(re.findall(r"^st (amdsmi_\w+)\(", HEAD, flags=re.M))
    rest = [name for name in symbols() if name not in own and name not in leave_out]
    source = folder / "stub.c"
    (folder / "lib").mkdir(parents=True)
    source.write_text(HEAD + "".join(f"st {name}() {{ return {NOT_SUPPORTED}; }}\n" for name in rest))
    target = folder / "lib" / "libamd_smi.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        f'-DSOCKET_PATH="{socket_path}"',
        "-o",
        str(target),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=120)
    return folder


@dataclass
class Library:
    """The server behind the stub: what this release of the library does with an emulated node.

    `order` permutes the sockets; `script` forces statuses: call -> list of statuses used up one by one (None: behave).
    `old` is 24.7: memory set refused where the board name lacks "mi" and "00x", caps not looked at, driver reloaded
    inside the call with success whatever came of it, secondaries act on the card, EINVAL is UNKNOWN.
    """

    node: Node
    path: Path
    version: str = "26.0.2"
    root: bool = True
    reverse: bool = False
    same_bdf: bool = False  # kernels with the partition id in the high bits: siblings share the address
    blind_partition: bool = False  # kfd_info says 0 on every sibling (24.7 with an unreadable mode file)
    no_profiles: bool = False
    old: bool = False
    hang_in_init: float = 0.0
    script: dict[str, list[int | None]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    open_sessions: int = 0

    def __enter__(self) -> Library:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen(16)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                line = b""
                while part := connection.recv(4096):
                    line += part
                try:
                    status, text = self.answer(line.decode())
                except Exception as error:  # shown to the test as a status nothing else uses
                    status, text = 77, repr(error)
                with contextlib.suppress(OSError):  # the child was killed while it waited
                    connection.sendall(f"{status} {text}".encode())

    def answer(self, line: str) -> tuple[int, str]:
        """Status and text for one request line."""
        call, *arguments = line.split()
        self.calls.append(line)
        forced = self.script.get(call, [])
        if forced and (status := forced.pop(0)) is not None:
            return status, ""
        numbers = [int(argument) for argument in arguments]
        method: Callable[..., tuple[int, str]] = getattr(self, f"_{call}")
        return method(*numbers)

    def _init(self, flags: int) -> tuple[int, str]:
        if not self.node.loaded:
            time.sleep(self.hang_in_init or 0)
            return 34, ""
        time.sleep(self.hang_in_init)
        self.open_sessions += 1
        return 0, ""

    def _shut_down(self) -> tuple[int, str]:
        self.open_sessions -= 1
        return 0, ""

    def _version(self) -> tuple[int, str]:
        return 0, self.version

    def _sockets(self) -> tuple[int, str]:
        cards = [str(card + 1) for card in range(len(self.node.state.cards))]
        return 0, " ".join(reversed(cards) if self.reverse else cards)

    def _devices(self, socket_handle: int) -> tuple[int, str]:
        card = socket_handle - 1
        count = sum(1 for c, _ in self.node.state.kfd_order if c == card)
        ids = [str(1000 + card * 8 + p) for p in range(count)]
        return 0, " ".join(reversed(ids) if self.reverse else ids)

    def _split(self, handle: int) -> tuple[int, int]:
        return divmod(handle - 1000, 8)

    def _bdf(self, handle: int) -> tuple[int, str]:
        card, p = self._split(handle)
        domain, bus, rest = self.node.bdfs()[card].split(":")
        function = 0 if self.same_bdf else p
        return 0, str(int(domain, 16) << 16 | int(bus, 16) << 8 | int(rest.split(".")[0], 16) << 3 | function)

    def _partition(self, handle: int) -> tuple[int, str]:
        return 0, "0" if self.blind_partition else str(self._split(handle)[1])

    def _read(self, handle: int, name: str) -> tuple[int, str]:
        card, p = self._split(handle)
        if p and not self.old:
            return NOT_SUPPORTED, ""
        try:
            return 0, self.node.sysfs().read(f"/sys/bus/pci/devices/{self.node.bdfs()[card]}/{name}").strip()
        except OSError as error:
            return ERRNO.get(error.errno or 0, UNKNOWN), ""

    def _compute(self, handle: int) -> tuple[int, str]:
        return self._read(handle, "current_compute_partition")

    def _memory(self, handle: int) -> tuple[int, str]:
        return self._read(handle, "current_memory_partition")

    def _config(self, handle: int) -> tuple[int, str]:
        if not self.root:
            return NO_PERM, ""
        if self.no_profiles:
            return 0, ""
        for word in ("SPX", "DPX", "QPX", "CPX"):  # the library selects each mode in turn and leaves the last
            self.node.fire("write_config", self.node.bdfs()[self._split(handle)[0]], word)
        return 0, "1 2 4 5"

    def _profile(self, handle: int) -> tuple[int, str]:
        if not self.root:
            return NO_PERM, ""
        status, word = self._compute(handle)
        number = next((n for n, w in COMPUTE.items() if w == word), 0)
        return status, str(number << 16 | (partitions_of(word, 8) if number else 0))

    def _set_profile(self, handle: int, index: int) -> tuple[int, str]:
        return self._set_compute(handle, (1, 2, 4, 5)[index]) if 0 <= index < 4 else (INVAL, "")

    def _set_compute(self, handle: int, value: int) -> tuple[int, str]:
        card, p = self._split(handle)
        word = COMPUTE.get(value)
        if not self.root:
            return NO_PERM, ""
        if word is None:
            return INVAL, ""
        if p and not self.old:
            return NOT_SUPPORTED, ""
        status, offered = self._read(handle - p, "available_compute_partition")
        if status:
            return status, ""
        if word not in offered.split(", "):
            return SETTING_UNAVAILABLE, ""
        return self._write(lambda: self.node.write_compute(self.node.bdfs()[card], word))

    def _set_memory(self, handle: int, value: int) -> tuple[int, str]:
        card, p = self._split(handle)
        word = MEMORY.get(value)
        if not self.root:
            return NO_PERM, ""
        if word is None:
            return INVAL, ""
        if self.old:
            return self._old_set_memory(card, word)
        if p:
            return NOT_SUPPORTED, ""
        return self._write(lambda: self.node.write_memory(self.node.bdfs()[card], word))

    def _old_set_memory(self, card: int, word: str) -> tuple[int, str]:
        name = self.node.state.model.pci_name.lower()
        if "mi" not in name or "00x" not in name:
            return NOT_SUPPORTED, ""
        answer = self._write(lambda: self.node.write_memory(self.node.bdfs()[card], word))
        with contextlib.suppress(OSError):  # `modprobe -r amdgpu && modprobe amdgpu&` loses its status
            self.node.reload()
        return answer

    def _write(self, act: Callable[[], None]) -> tuple[int, str]:
        try:
            act()
        except OSError as error:
            if self.old and error.errno == errno.EINVAL:
                return UNKNOWN, ""
            return ERRNO.get(error.errno or 0, UNKNOWN), ""
        return 0, ""

    def _modprobe(self, remove: int) -> tuple[int, str]:
        """What the stand-in for modprobe asks for: an exit status and the message for stderr."""
        try:
            self.node.unload() if remove else self.node.load()
        except OSError as error:
            in_use = error.errno == errno.EAGAIN
            return 1, "modprobe: FATAL: Module amdgpu is in use." if in_use else f"modprobe: ERROR: {error}"
        return 0, ""

    def _power(self, handle: int) -> tuple[int, str]:
        return 0, str(700 + self._split(handle)[0])

    def _activity(self, handle: int) -> tuple[int, str]:
        return NOT_SUPPORTED, ""


def short_folder(*, on_disk: bool = False) -> Path:
    """A private folder with a short name: a Unix socket's path has 107 characters at most.

    `on_disk` for tests that mount over `/dev`, where the temporary folders in memory are.
    """
    return Path(tempfile.mkdtemp(prefix="dp-", dir="/tmp" if on_disk else None))
