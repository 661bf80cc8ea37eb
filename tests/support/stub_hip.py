"""An emulated libamdhip64: C made from a table of calls, compiled into a folder of the test, driven through `Stub`.

Device memory is host memory behind files, so that contents survive a remap and another process can open an exported
allocation. Every call is logged with its arguments; any call can be made to fail at its n-th use from now. Rules of the
real runtime that callers must keep are kept here: an unmap must match one map, an object is released after its last
unmap, a range is freed empty, and memory without access cannot be touched (SIGSEGV). Layouts are written out from
hip_runtime_api.h and hsa_ext_amd.h, independent of the ctypes ones under test.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

HEAD = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
typedef int err;
enum { OK = 0, INVALID = 1, NOMEM = 2, BADPTR = 17, NODEV = 101, NOPEER = 217, ALREADY = 704, CAPTURE = 900 };
enum { PLAIN = 1, UNCACHED = 2, OBJECT = 3, RANGE = 4, OPENED = 5, MANAGED = 6 };
#define MIB2 (2ul << 20)
#define DEVICES 4
#define ENTRIES 65536
typedef struct { int kind, device, mapped, fd, released, on_host, spill_to; char *at; size_t size, spilled; } entry;
static entry entries[ENTRIES]; static int used_entries;
typedef struct { char *at; size_t size; entry *object; } mapping;
static mapping maps[ENTRIES]; static int used_maps;
static struct { size_t total, used; char bus[32]; unsigned gpu_id, node; } devices[DEVICES];
static int device_count, current, capturing, uncached_on_host, granularity = MIB2, version = 70000000;
static int no_peer[DEVICES][DEVICES], peer_on[DEVICES][DEVICES];
static size_t spill_bytes; static int spill_to = -1;
static char counters[512]; static char *text; static size_t text_used, text_size;
static struct { char call[48]; int at, code; } faults[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void say(const char *format, ...) {
    va_list list; char line[256]; va_start(list, format);
    int n = vsnprintf(line, sizeof line, format, list); va_end(list);
    if (text_used + n + 2 > text_size) text = realloc(text, text_size = 2 * (text_used + n + 4096));
    memcpy(text + text_used, line, n); text_used += n; text[text_used++] = '\n'; text[text_used] = 0;
}
static err fault(const char *call) {
    err code = OK;
    for (int i = 0; i < 64; i++)
        if (faults[i].at > 0 && !strcmp(faults[i].call, call) && --faults[i].at == 0 && !code) code = faults[i].code;
    return code;
}
static void count(int device) {
    char path[600]; if (!counters[0]) return;
    snprintf(path, sizeof path, "%s/vram_%u", counters, devices[device].gpu_id);
    FILE *f = fopen(path, "w"); if (f) { fprintf(f, "%zu\n", devices[device].used); fclose(f); }
}
static err charge(int device, size_t size, entry *e) {
    size_t away = spill_to >= 0 && spill_to != device ? spill_bytes : 0;
    if (away > size) away = size;
    if (devices[device].used + size - away > devices[device].total) return NOMEM;
    devices[device].used += size - away; count(device);
    if (away) { devices[spill_to].used += away; count(spill_to); }
    e->spilled = away; e->spill_to = spill_to; return OK;
}
static void refund(entry *e) {
    if (e->on_host) return;
    devices[e->device].used -= e->size - e->spilled; count(e->device);
    if (e->spilled) { devices[e->spill_to].used -= e->spilled; count(e->spill_to); }
}
static entry *fresh(int kind, int device, size_t size) {
    entry *e = 0;
    for (int i = 0; i < used_entries && !e; i++) if (!entries[i].kind) e = &entries[i];
    if (!e) e = &entries[used_entries++];
    memset(e, 0, sizeof *e); e->kind = kind; e->device = device; e->size = size; e->fd = -1; return e;
}
static entry *holding(void *p) {
    for (int i = 0; i < used_entries; i++) { entry *e = &entries[i];
        if ((e->kind == PLAIN || e->kind == UNCACHED || e->kind == OPENED || e->kind == MANAGED)
            && (char *)p >= e->at && (char *)p < e->at + e->size) return e; }
    for (int i = 0; i < used_maps; i++)
        if (maps[i].at && (char *)p >= maps[i].at && (char *)p < maps[i].at + maps[i].size) return maps[i].object;
    return 0;
}
static char *aligned(size_t size, size_t to) {
    char *raw = mmap(0, size + to, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return 0;
    char *at = (char *)(((uintptr_t)raw + to - 1) / to * to);
    if (at > raw) munmap(raw, at - raw);
    munmap(at + size, raw + to - at); return at;
}
static void away(char *at, size_t size) {
    mmap(at, size, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); }
static int file(size_t size) { int fd = memfd_create("hbm", 0); if (fd >= 0 && ftruncate(fd, size)) {} return fd; }
static err plain(void **out, size_t size, int kind) {
    size_t whole = (size + MIB2 - 1) / MIB2 * MIB2;
    entry *e = fresh(kind, current, whole); e->on_host = kind == UNCACHED && uncached_on_host;
    err s = e->on_host ? OK : charge(current, whole, e);
    if (s) { e->kind = 0; return s; }
    e->at = aligned(whole, MIB2); e->fd = file(whole);
    mmap(e->at, whole, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED | MAP_NORESERVE, e->fd, 0);
    *out = e->at; return OK;
}
typedef struct { int type, id; } location;
typedef struct { int type, handle_type; location where; void *win32;
                 struct { uint8_t c, r; uint16_t u; } flags; } props;
typedef struct { location where; int flags; } access_desc;
typedef struct { int type, device; void *dptr, *hptr; int managed; unsigned flags; } attributes;
typedef struct { char reserved[64]; } ipc;
typedef struct { uint32_t size, type; void *agent, *host; size_t bytes; void *user; uint64_t owner; uint32_t flags;
                 bool registered; } info;
static err check_props(const props *p) {
    return p->type != 1 || p->handle_type || p->where.type != 1 || p->win32 || p->flags.c || p->flags.r || p->flags.u
        ? INVALID : p->where.id < 0 || p->where.id >= device_count ? NODEV : OK; }
static err let_go(entry *e) { if (e->fd >= 0) close(e->fd); refund(e); e->kind = 0; return OK; }
const char *hipGetErrorName(err e) {
    switch (e) { case INVALID: return "hipErrorInvalidValue"; case NOMEM: return "hipErrorOutOfMemory";
        case NODEV: return "hipErrorInvalidDevice"; case NOPEER: return "hipErrorPeerAccessUnsupported";
        case ALREADY: return "hipErrorPeerAccessAlreadyEnabled";
        case CAPTURE: return "hipErrorStreamCaptureUnsupported";
        default: return "hipErrorUnknown"; } }
void stub_reset(int n, size_t total, const char *folder) {
    for (int i = 0; i < used_maps; i++) if (maps[i].at) away(maps[i].at, maps[i].size);
    for (int i = 0; i < used_entries; i++) if (entries[i].kind && entries[i].fd >= 0) close(entries[i].fd);
    memset(entries, 0, sizeof entries); memset(maps, 0, sizeof maps); memset(faults, 0, sizeof faults);
    memset(no_peer, 0, sizeof no_peer); memset(peer_on, 0, sizeof peer_on); used_entries = used_maps = 0;
    device_count = n; current = capturing = uncached_on_host = 0; granularity = MIB2; spill_bytes = 0; spill_to = -1;
    version = 70000000; text_used = 0; snprintf(counters, sizeof counters, "%s", folder);
    for (int i = 0; i < n; i++) { devices[i].total = total; devices[i].used = 0; }
}
void stub_device(int i, const char *bus, unsigned gpu_id, unsigned node) {
    snprintf(devices[i].bus, 32, "%s", bus); devices[i].gpu_id = gpu_id; devices[i].node = node; count(i); }
void stub_fail(const char *call, int nth, int code) {
    for (int i = 0; i < 64; i++) if (faults[i].at <= 0) {
        snprintf(faults[i].call, 48, "%s", call); faults[i].at = nth; faults[i].code = code; return; } }
void stub_no_faults(void) { memset(faults, 0, sizeof faults); }
void stub_set(const char *name, long a, long b) {
    if (!strcmp(name, "capturing")) capturing = a; else if (!strcmp(name, "granularity")) granularity = a;
    else if (!strcmp(name, "uncached_on_host")) uncached_on_host = a; else if (!strcmp(name, "version")) version = a;
    else if (!strcmp(name, "no_peer")) no_peer[a][b] = 1;
    else if (!strcmp(name, "spill")) { spill_bytes = a; spill_to = b; } }
const char *stub_log(void) { return text_used ? text : ""; }
void stub_clear_log(void) { text_used = 0; }
size_t stub_used(int device) { return devices[device].used; }
int stub_live(int kind) { int n = 0; for (int i = 0; i < used_entries; i++) n += entries[i].kind == kind; return n; }
int stub_maps(void) { int n = 0; for (int i = 0; i < used_maps; i++) n += maps[i].at != 0; return n; }
err stub_managed(void **out, size_t size) { current = 0; return plain(out, size, MANAGED); }
"""

# name, C parameters, what the log shows, body
CALLS: list[tuple[str, str, str, str]] = [
    ("hipRuntimeGetVersion", "int *out", '""', "*out = version; return OK;"),
    ("hipGetDeviceCount", "int *out", '""', "*out = device_count; return OK;"),
    ("hipGetDevice", "int *out", '""', "*out = current; return OK;"),
    (
        "hipSetDevice",
        "int d",
        '"%d", d',
        "if (d < 0 || d >= device_count) return NODEV; current = d; return OK;",
    ),
    (
        "hipDeviceGetPCIBusId",
        "char *out, int n, int d",
        '"%d", d',
        'if (d < 0 || d >= device_count) return NODEV; snprintf(out, n, "%s", devices[d].bus); return OK;',
    ),
    (
        "hipMemGetInfo",
        "size_t *free_, size_t *total",
        '"%d", current',
        "*total = devices[current].total; *free_ = *total - devices[current].used; return OK;",
    ),
    ("hipMalloc", "void **out, size_t n", '"%d %zu", current, n', "return plain(out, n, PLAIN);"),
    (
        "hipExtMallocWithFlags",
        "void **out, size_t n, unsigned flags",
        '"%d %zu %u", current, n, flags',
        "if (flags != 3) return INVALID; return plain(out, n, UNCACHED);",
    ),
    (
        "hipFree",
        "void *p",
        '"%p", p',
        "entry *e = holding(p); if (!e || e->at != p || e->kind == OPENED) return INVALID; munmap(e->at, e->size);"
        " return let_go(e);",
    ),
    ("hipDeviceSynchronize", "void", '"%d", current', "return OK;"),
    (
        "hipMemcpy",
        "void *to, void *from, size_t n, int kind",
        '"%p %p %zu %d", to, from, n, kind',
        "if (kind != 4 || !holding(to) || !holding(from)) return INVALID; memcpy(to, from, n); return OK;",
    ),
    (
        "hipMemGetAllocationGranularity",
        "size_t *out, const props *p, int option",
        '"%d %d", p->where.id, option',
        "err s = check_props(p); *out = granularity; return s;",
    ),
    (
        "hipMemAddressReserve",
        "void **out, size_t n, size_t to, void *hint, unsigned long long flags",
        '"%zu %zu", n, to',
        "if (!n || n % 4096 || flags || hint) return INVALID; entry *e = fresh(RANGE, -1, n);"
        " e->at = aligned(n, to > MIB2 ? to : MIB2); *out = e->at; return OK;",
    ),
    (
        "hipMemAddressFree",
        "void *p, size_t n",
        '"%p %zu", p, n',
        "for (int i = 0; i < used_maps; i++) if (maps[i].at >= (char *)p && maps[i].at < (char *)p + n) return INVALID;"
        " for (int i = 0; i < used_entries; i++) { entry *e = &entries[i];"
        " if (e->kind == RANGE && e->at == p && e->size == n) { munmap(p, n); e->kind = 0; return OK; } }"
        " return INVALID;",
    ),
    (
        "hipMemCreate",
        "void **out, size_t n, const props *p, unsigned long long flags",
        '"%d %zu", p->where.id, n',
        "err s = check_props(p); if (s) return s; if (flags || n % granularity) return INVALID;"
        " entry *e = fresh(OBJECT, p->where.id, n); if ((s = charge(e->device, n, e))) { e->kind = 0; return s; }"
        " e->fd = file(n); *out = e; return OK;",
    ),
    (
        "hipMemRelease",
        "void *h",
        '"%p", h',
        "entry *e = h; if (e->kind != OBJECT || e->released) return INVALID;"
        " if (e->mapped) { e->released = 1; return INVALID; } return let_go(e);",
    ),
    (
        "hipMemMap",
        "void *p, size_t n, size_t offset, void *h, unsigned long long flags",
        '"%p %zu %p", p, n, h',
        "entry *e = h; if (offset || flags || e->kind != OBJECT || n != e->size) return INVALID;"
        " for (int i = 0; i < used_maps; i++)"
        " if (maps[i].at && maps[i].at < (char *)p + n && (char *)p < maps[i].at + maps[i].size) return INVALID;"
        " mapping *m = 0; for (int i = 0; i < used_maps && !m; i++) if (!maps[i].at) m = &maps[i];"
        " if (!m) m = &maps[used_maps++];"
        " mmap(p, n, PROT_NONE, MAP_FIXED | MAP_SHARED | MAP_NORESERVE, e->fd, 0);"
        " m->at = p; m->size = n; m->object = e; e->mapped++; return OK;",
    ),
    (
        "hipMemUnmap",
        "void *p, size_t n",
        '"%p %zu", p, n',
        "for (int i = 0; i < used_maps; i++) if (maps[i].at == p && maps[i].size == n) {"
        " away(p, n); maps[i].at = 0; maps[i].object->mapped--; return OK; } return INVALID;",
    ),
    (
        "hipMemSetAccess",
        "void *p, size_t n, const access_desc *d, size_t count_",
        '"%p %zu %zu", p, n, count_',
        "for (size_t i = 0; i < count_; i++) { if (d[i].where.type != 1 || d[i].flags != 3) return INVALID;"
        " if (d[i].where.id < 0 || d[i].where.id >= device_count) return NODEV; }"
        " for (char *at = p; at < (char *)p + n; ) { mapping *m = 0; for (int i = 0; i < used_maps && !m; i++)"
        " if (maps[i].at == at) m = &maps[i]; if (!m) return INVALID;"
        " mprotect(m->at, m->size, PROT_READ | PROT_WRITE); at += m->size; } return OK;",
    ),
    (
        "hipPointerGetAttributes",
        "attributes *out, const void *p",
        '"%p", p',
        "entry *e = holding((void *)p); memset(out, 0, sizeof *out); if (!e) return INVALID;"
        " out->type = e->on_host ? 1 : e->kind == MANAGED ? 3 : 2; out->device = e->device;"
        " out->dptr = (void *)p; out->managed = e->kind == MANAGED; return OK;",
    ),
    (
        "hipDeviceCanAccessPeer",
        "int *out, int d, int peer",
        '"%d %d", d, peer',
        "if (d < 0 || peer < 0 || d >= device_count || peer >= device_count) return NODEV;"
        " *out = d != peer && !no_peer[d][peer]; return OK;",
    ),
    (
        "hipDeviceEnablePeerAccess",
        "int peer, unsigned flags",
        '"%d %d", current, peer',
        "if (flags) return INVALID; if (no_peer[current][peer]) return NOPEER;"
        " if (peer_on[current][peer]) return ALREADY; peer_on[current][peer] = 1; return OK;",
    ),
    (
        "hipIpcGetMemHandle",
        "ipc *out, void *p",
        '"%p", p',
        "entry *e = holding(p); if (!e || e->at != p || e->kind == OBJECT) return INVALID;"
        ' memset(out, 0, 64); snprintf(out->reserved, 64, "%d %d %zu %d", getpid(), e->fd, e->size, e->device);'
        " return OK;",
    ),
    (
        "hipIpcOpenMemHandle",
        "void **out, ipc handle, unsigned flags",
        '"%u", flags',
        "int pid, fd, device; size_t n; char path[64]; if (flags != 1) return INVALID;"
        ' if (sscanf(handle.reserved, "%d %d %zu %d", &pid, &fd, &n, &device) != 4) return INVALID;'
        ' snprintf(path, 64, "/proc/%d/fd/%d", pid, fd); int own = open(path, O_RDWR); if (own < 0) return INVALID;'
        " entry *e = fresh(OPENED, device, n); e->on_host = 0; e->fd = own; e->at = aligned(n, MIB2);"
        " mmap(e->at, n, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED | MAP_NORESERVE, own, 0);"
        " *out = e->at; return OK;",
    ),
    (
        "hipIpcCloseMemHandle",
        "void *p",
        '"%p", p',
        "entry *e = holding(p); if (!e || e->kind != OPENED || e->at != p) return INVALID;"
        " munmap(e->at, e->size); close(e->fd); e->kind = 0; return OK;",
    ),
    (
        "hsa_amd_pointer_info",
        "void *p, info *out, void *a, void *b, void *c",
        '"%p", p',
        "entry *e = holding(p); out->type = e ? 1 : 0; if (!e) return OK; out->bytes = e->size;"
        " out->owner = e->on_host ? 1000 : e->device + 1; out->flags = e->kind == UNCACHED ? 8 : 4; return OK;",
    ),
    (
        "hsa_agent_get_info",
        "uint64_t agent, int what, uint32_t *out",
        '"%d", what',
        "if (what == 17) *out = agent != 1000; else if (what == 0xA004)"
        " *out = agent == 1000 ? 0 : devices[agent - 1].node; else return INVALID; return OK;",
    ),
]
FORBIDDEN_IN_CAPTURE = (
    "hipMalloc", "hipExtMallocWithFlags", "hipFree", "hipDeviceSynchronize", "hipMemcpy", "hipMemCreate", "hipMemMap",
)  # fmt: skip
PLAIN, UNCACHED, OBJECT, RANGE, OPENED, MANAGED = 1, 2, 3, 4, 5, 6


def build(folder: Path) -> Path:
    """Compile the library into `folder`; skips where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here to build the stub of the HIP runtime with")
    source, target = folder / "stub_hip.c", folder / "libamdhip64.so"
    source.write_text(HEAD + "".join(_function(*call) for call in CALLS))
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-pthread", "-o", str(target), str(source)]
    subprocess.run(command, check=True, timeout=120)
    return target


def _function(name: str, parameters: str, shown: str, body: str) -> str:
    names = ", ".join(p.split()[-1].lstrip("*") for p in parameters.split(",") if p != "void")
    capture = "if (!s && capturing) s = CAPTURE;" if name in FORBIDDEN_IN_CAPTURE else ""
    show = f"char line[160]; snprintf(line, 160, {shown});"
    return (
        f"static err do_{name}({parameters}) {{ {body} }}\n"
        f'err {name}({parameters}) {{ pthread_mutex_lock(&lock); {show} say("{name} %s", line);'
        f' err s = fault("{name}"); {capture} if (!s) s = do_{name}({names});'
        " pthread_mutex_unlock(&lock); return s; }\n"
    )


@dataclass
class Stub:
    """The controls of a loaded stub; `path` is its file."""

    path: Path

    def __post_init__(self) -> None:
        self.library = ctypes.CDLL(str(self.path))
        self.library.stub_log.restype = ctypes.c_char_p
        self.library.stub_used.restype = ctypes.c_size_t
        self.library.stub_reset.argtypes = (ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p)
        self.library.stub_set.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_long)

    def reset(self, devices: list[tuple[str, int, int]], total_bytes: int, counters: Path | None) -> None:
        """Start anew with devices of (PCI address, KFD gpu id, KFD node); counters are written below a folder."""
        self.library.stub_reset(len(devices), total_bytes, str(counters or "").encode())
        for index, (bus, gpu_id, node) in enumerate(devices):
            self.library.stub_device(index, bus.encode(), gpu_id, node)

    def fail(self, call: str, nth: int, code: int) -> None:
        """The nth use of a call from now fails with a code."""
        self.library.stub_fail(call.encode(), nth, code)

    def no_faults(self) -> None:
        """Forget the failures that have not come yet."""
        self.library.stub_no_faults()

    def set(self, name: str, first: int, second: int = 0) -> None:
        """One of capturing, granularity, uncached_on_host, version, no_peer, spill."""
        self.library.stub_set(name.encode(), first, second)

    def log(self, *calls: str) -> list[str]:
        """Lines of the log, of the named calls or of all."""
        lines = self.library.stub_log().decode().splitlines()
        return [line for line in lines if not calls or line.split()[0] in calls]

    def clear(self) -> None:
        """Empty the log."""
        self.library.stub_clear_log()

    def used(self, device: int) -> int:
        """Bytes that a device has given."""
        return int(self.library.stub_used(device))

    def empty(self) -> bool:
        """Nothing is allocated, mapped, reserved or open."""
        live = [self.library.stub_live(kind) for kind in (PLAIN, UNCACHED, OBJECT, RANGE, OPENED)]
        return not any(live) and self.library.stub_maps() == 0

    def managed(self, nbytes: int) -> int:
        """Managed memory, as a program of the user's could make it."""
        found = ctypes.c_void_p()
        assert self.library.stub_managed(ctypes.byref(found), ctypes.c_size_t(nbytes)) == 0
        return found.value or 0
