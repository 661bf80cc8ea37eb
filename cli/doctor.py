"""`dieplace doctor`: what works on this host, what does not, why, and what to do about it."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from dieplace.allocator_settings import expandable_segments
from dieplace.cli import render
from dieplace.cli.options import settings
from dieplace.cli.table import Column, Table
from dieplace.discover import probes
from dieplace.hostnodes import host_domains
from dieplace.sysfs import Sysfs

PACKAGES = (
    "torch",
    "triton",
    "flydsl",
    "amdsmi",
    "pyrsmi",
    "psutil",
    "click",
    "rich",
    "numpy",
    "scipy",
    "matplotlib",
    "safetensors",
)
ROCM_PLACES = ("/opt/rocm/lib", "/opt/rocm/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True)
class Check:
    """One thing a user may want: whether it works here, why (not), and what to do."""

    what: str
    works: bool
    why: str
    do: str | None = None


@click.command()
@click.option("--rocm-path", metavar="DIR", help="Look for ROCm's libraries in this ROCm instead of /opt/rocm.")
@click.pass_context
def doctor(ctx: click.Context, rocm_path: str | None) -> None:
    """Say what works on this host, what does not, why, and what to install.

    Nothing is changed, and no vendor library is loaded but for NVIDIA's own list of GPUs.
    """
    chosen = settings(ctx)
    checks = list(_checks(chosen.backend, chosen.node, rocm_path))
    versions = package_versions()
    rows = [{"what": c.what, "works": c.works, "why": c.why, "do": c.do} for c in checks]
    payload = {
        "python": platform.python_version(),
        "packages": [{"name": name, "version": version} for name, version in versions.items()],
        "checks": rows,
    }
    render.answer(ctx, "doctor/1", payload, table=lambda: _body(rows, versions))


def _body(rows: list[dict[str, Any]], versions: dict[str, str | None]) -> Iterator[Table | str]:
    columns = [Column("what", "what"), Column("works", "works"), Column("why", "why")]
    yield Table(columns, rows, "what works on this host")
    todo = [row for row in rows if row["do"]]
    if todo:
        yield ""
        yield Table([Column("what", "for"), Column("do", "do this")], todo)
    yield ""
    shown = ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items())
    yield Table([Column("name", f"Python {platform.python_version()}")], [{"name": shown}])


def package_versions() -> dict[str, str | None]:
    """Installed versions by package, None where absent; read from metadata, nothing is imported."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _checks(backend: str | None, node: str | None, rocm_path: str | None) -> Iterator[Check]:
    answers = probes(node=node)
    versions = package_versions()
    amd, nvidia = answers["amd"], answers["nvidia"]
    yield Check("see AMD cards", amd.available, amd.reason, amd.hint)
    yield from _amd_checks(amd.available, versions, rocm_path)
    yield Check("see NVIDIA GPUs", nvidia.available, nvidia.reason, nvidia.hint)
    yield _torch_check(versions, nvidia.available, amd.available)
    yield _state_check()
    emulated = answers["emulated"]
    yield Check("use an emulated node", emulated.available, emulated.reason, emulated.hint)
    if backend == "emulated" and emulated.available:
        from dieplace.backends.emulated import EmulatedBackend

        yield replace(render_node_check(EmulatedBackend(node).sysfs), what="open its render nodes")
    yield _package_check("build and emulate FlyDSL kernels", "flydsl", versions)
    yield _segments_check()
    yield _package_check("Triton kernels", "triton", versions, "comes with torch on Linux x86-64 GPU builds")
    yield _package_check("statistics of experiments", "scipy", versions)
    yield _package_check("charts in reports", "matplotlib", versions)
    yield _cpu_check()
    yield _numa_check()


def _amd_checks(present: bool, versions: dict[str, str | None], rocm_path: str | None) -> Iterator[Check]:
    folders = [f"{rocm_path}/lib", f"{rocm_path}/lib64"] if rocm_path else list(ROCM_PLACES)
    smi, hip = _library("libamd_smi.so", folders), _library("libamdhip64.so", folders)
    where = "there is no AMD card here"
    if not present:
        yield Check("switch AMD partitions", False, where)
        yield Check("place memory on AMD dies", False, where)
        return
    yield from _switch_checks(smi, versions)
    yield render_node_check(Sysfs())
    yield Check(
        "place memory on AMD dies",
        hip is not None,
        f"HIP runtime {hip}" if hip else f"no libamdhip64.so in {', '.join(folders)}",
        None if hip else "install ROCm, or name it: --rocm-path DIR",
    )
    kfd = os.access("/dev/kfd", os.R_OK | os.W_OK)
    yield Check(
        "open /dev/kfd",
        kfd,
        "readable and writable" if kfd else "no access for this user",
        None if kfd else "add the user to the groups render and video, and log in again",
    )


def render_node_check(sysfs: Sysfs) -> Check:
    """EACCES on one render node whose KFD node is visible makes hsa_init fail altogether (ROCm issue 3144)."""
    from dieplace.backends.amd.topology import closed_render_nodes
    from dieplace.sysfs import errno_name

    closed = closed_render_nodes(sysfs)
    if not closed:
        return Check("open render nodes", True, "every device that KFD shows can be opened")
    told = ", ".join(f"{path} ({errno_name(code)})" for path, code in closed)
    if any(code == errno.EACCES for code in dict(closed).values()):
        why = f"no access to {told}: HIP fails as a whole on a node where one visible device gives EACCES"
        return Check(
            "open render nodes", False, why,
            "give the user all of them (groups render and video); hide a card by the device cgroup, never by chmod",
        )  # fmt: skip
    return Check("open render nodes", False, f"{told}: HIP skips these", "is the container given these devices?")


def _switch_checks(smi: str | None, versions: dict[str, str | None]) -> Iterator[Check]:
    root = os.geteuid() == 0
    yield Check(
        "switch AMD partitions",
        root,
        "running as root" if root else "switching writes to sysfs and reloads the driver: it needs root",
        None if root else "run it with sudo; --dry-run needs no root",
    )
    binding = versions["amdsmi"]
    yield Check(
        "switch through amdsmi",
        bool(smi and binding),
        f"library {smi or 'not found'}, Python package {binding or 'absent'}; sysfs is used without it",
        None if smi and binding else "install the amdsmi package that came with this ROCm (share/amd_smi)",
    )
    modprobe = shutil.which("modprobe", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    yield Check("reload the driver", modprobe is not None, modprobe or "there is no modprobe on this host")


def _library(name: str, folders: list[str]) -> str | None:
    for folder in folders:
        try:
            found = sorted(path.name for path in Path(folder).glob(f"{name}*"))
        except OSError:
            found = []
        if found:
            return f"{folder}/{found[0]}"
    return None


def _torch_check(versions: dict[str, str | None], nvidia: bool, amd: bool) -> Check:
    version = versions["torch"]
    if version is None:
        return Check("PyTorch", False, "torch is not installed", "install torch for this machine's accelerator")
    build = version.partition("+")[2] or "default build"
    wanted = ("rocm" if amd else "") or ("cu" if nvidia else "")
    fits = not wanted or build.startswith(wanted) or build == "default build"
    do = None if fits else f"install a {'ROCm' if amd else 'CUDA'} build of torch in place of {version}"
    return Check("PyTorch", fits, f"torch {version}" + ("" if fits else " cannot use the accelerator here"), do)


def _segments_check() -> Check:
    found = expandable_segments()
    if not found.on:
        return Check("torch allocator", True, "no expandable segments")
    told = f"expandable segments are on ({found.source}): nothing is measured with them"
    return Check("torch allocator", False, told, "run without that setting")


def _package_check(what: str, name: str, versions: dict[str, str | None], note: str = "") -> Check:
    version = versions[name]
    if version is not None:
        return Check(what, True, f"{name} {version}")
    return Check(what, False, f"{name} is not installed", note or f"pip install {name}")


def _state_check() -> Check:
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "dieplace"
    near = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    works = os.access(near, os.W_OK)
    do = None if works else "set XDG_STATE_HOME to a folder that can be written"
    return Check("keep state", works, f"{folder} can{'' if works else 'not'} be written", do)


def _cpu_check() -> Check:
    """CPUs that this process may use: the smaller of its affinity and the cgroup's quota."""
    from dieplace.binding.host import cpu_quota

    allowed = len(os.sched_getaffinity(0))
    quota, why = cpu_quota(Sysfs())
    limit = f"quota of {quota:g} CPUs ({why})" if quota is not None else f"no CPU quota ({why})"
    few = quota is not None and quota < allowed
    do = "raise the container's CPU limit: workers are counted by the quota, not by the CPUs" if few else None
    return Check("use the CPUs", True, f"{allowed} of {os.cpu_count()} allowed, {limit}", do)


def _numa_check() -> Check:
    count = len(host_domains(Sysfs()))
    if count > 1:
        return Check("bind to CPU NUMA nodes", True, f"{count} nodes")
    return Check("bind to CPU NUMA nodes", False, "the host has one node, or shows none: there is nothing to choose")


def python_facts() -> dict[str, Any]:
    """Interpreter and platform, for `dieplace env`."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(terse=True),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "byteorder": sys.byteorder,
    }
