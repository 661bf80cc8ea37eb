"""What AMD's own library demands of a tree, checked row by row without knowing how the tree was made.

Each row was found by running libamd_smi 24.7 over a tree with that one thing broken; `CONSEQUENCE` says what the
library did. The checks read files only, so they hold for recorded trees too.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

CONSEQUENCE = {
    "card-link": "Failed to construct BDFID, wrong or missing devices",
    "one-render": "the device gets no render node and an uninitialised BDF with status 0",
    "class-render": "the node is refused and the BDF is garbage with status 0",
    "dev-render": "the BDF is garbage with status 0",
    "vendor": "the card and its partitions are missing",
    "xcp-vendor": "amdsmi_init does not return",
    "some-card": "amdsmi_init loops over 2^32 card numbers",
    "unique-id": "secondary partitions are not listed",
    "node-gap": "partitions behind the gap are lost",
    "io-links": "SIGSEGV in amdsmi_init",
    "gpu-keys": "amdsmi_init fails with 32",
    "digits": "amdsmi_init fails with 32",
    "properties": "the node and all nodes behind it count as missing",
    "gpu-id": "secondaries are lost and numa_node is uninitialised memory with status 0",
    "kfd-proc": "process lists are empty",
    "initstate": "a failing init reports 34 in place of 32",
}
NEEDED_KEYS = ("hive_id", "simd_arrays_per_engine", "array_count", "cu_per_simd_array", "location_id", "domain")
_CARD_LINK = re.compile(r"/([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/drm/(card\d+)$")


@dataclass(frozen=True)
class Violation:
    """One demand that the tree does not meet: its row, the absolute path, what was found there."""

    row: str
    path: str
    found: str

    def __str__(self) -> str:
        return f"{self.row}: {self.path}: {self.found}; the library then: {CONSEQUENCE[self.row]}"


@dataclass(frozen=True)
class _Node:
    number: int
    path: str
    properties: dict[str, str] | None
    gpu_id: str | None

    def key(self) -> str | None:
        """`dddd:bb:dd` of the card; None where domain or location are not numbers."""
        try:
            values = self.properties or {}
            place = int(values["location_id"]) & 0xFFFF
            return f"{int(values['domain']):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}"
        except (KeyError, ValueError):
            return None


def check_tree(root: str | Path) -> list[Violation]:
    """Every way in which the tree under `root` falls short of what libamd_smi 24.7 demands; empty is good."""
    home = Path(root)
    found = _check_drm(home) + _check_module(home)
    if not (home / "sys/class/kfd/kfd/topology").is_dir():
        return found
    nodes = _nodes(home)
    return found + _check_nodes(home, nodes) + _check_cards(home, nodes)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _nodes(home: Path) -> list[_Node]:
    base = home / "sys/class/kfd/kfd/topology/nodes"
    numbers = sorted(int(name) for name in os.listdir(base) if name.isdigit()) if base.is_dir() else []
    nodes = []
    for number in numbers:
        text = _text(base / str(number) / "properties")
        pairs = None if text is None else dict(line.split(None, 1) for line in text.splitlines() if " " in line.strip())
        nodes.append(_Node(number, f"/{base.relative_to(home)}/{number}", pairs, _text(base / str(number) / "gpu_id")))
    return nodes


def _is_gpu(node: _Node) -> bool:
    values = node.properties or {}
    return values.get("cpu_cores_count") == "0" or node.gpu_id not in (None, "", "0")


def _check_module(home: Path) -> list[Violation]:
    found = []
    state = _text(home / "sys/module/amdgpu/initstate")
    if state != "live":
        found.append(Violation("initstate", "/sys/module/amdgpu/initstate", f"reads {state!r}"))
    if (home / "sys/class/kfd/kfd").is_dir() and not (home / "sys/class/kfd/kfd/proc").is_dir():
        found.append(Violation("kfd-proc", "/sys/class/kfd/kfd/proc", "no such folder"))
    return found


def _check_drm(home: Path) -> list[Violation]:
    found, drm, platform = [], home / "sys/class/drm", home / "sys/devices/platform"
    if drm.is_dir() and not any(re.fullmatch(r"card\d+", name) for name in os.listdir(drm)):
        found.append(Violation("some-card", "/sys/class/drm", "no card in it"))
    for name in sorted(os.listdir(platform)) if platform.is_dir() else []:
        if name.startswith("amdgpu_xcp") and (platform / name / "vendor").exists():
            found.append(Violation("xcp-vendor", f"/sys/devices/platform/{name}/vendor", "is there"))
    for name in sorted(os.listdir(drm)) if drm.is_dir() else []:
        if re.fullmatch(r"card\d+", name):
            found += _check_card_link(drm / name, name)
    return found


def _check_card_link(path: Path, name: str) -> list[Violation]:
    shown = f"/sys/class/drm/{name}"
    if not path.is_symlink():
        return [Violation("card-link", shown, "is not a link")]
    text = os.readlink(path)
    match = _CARD_LINK.search(text)
    on_platform = "/platform/" in text and text.endswith(f"/drm/{name}")
    if not on_platform and (match is None or match.group(2) != name):
        return [Violation("card-link", shown, f"its text is {text!r}")]
    return []


def _check_nodes(home: Path, nodes: list[_Node]) -> list[Violation]:
    found = []
    for expected, node in enumerate(nodes):
        if node.number != expected:
            found.append(Violation("node-gap", node.path, f"node {expected} is missing"))
            break
    for node in nodes:
        if not (home / node.path.lstrip("/") / "io_links").is_dir():
            found.append(Violation("io-links", f"{node.path}/io_links", "no such folder"))
        if node.gpu_id is None:
            found.append(Violation("gpu-id", f"{node.path}/gpu_id", "no such file"))
        if node.properties is None:
            found.append(Violation("properties", f"{node.path}/properties", "no such file"))
            continue
        bad = [
            f"{key} {value}" for key, value in node.properties.items() if not value[:1].isdigit() or value[:2] == "0x"
        ]
        found += [Violation("digits", f"{node.path}/properties", line) for line in bad]
        missing = [key for key in NEEDED_KEYS if key not in node.properties] if _is_gpu(node) else []
        found += [Violation("gpu-keys", f"{node.path}/properties", f"no {key}") for key in missing]
    return found


def _check_cards(home: Path, nodes: list[_Node]) -> list[Violation]:
    found: list[Violation] = []
    seen: set[str] = set()
    for node in filter(_is_gpu, nodes):
        key = node.key()
        if key is None:
            continue
        device = home / f"sys/bus/pci/devices/{key}.0"
        if key not in seen:
            seen.add(key)
            found += _check_card(home, device, key)
        found += _check_render(home, (node.properties or {}).get("drm_render_minor"), node.path)
        package, own = _text(device / "unique_id"), (node.properties or {}).get("unique_id")
        if package is None or own is None or not own.isdigit() or not _equal(package, own):
            found.append(Violation("unique-id", f"{node.path}/properties", f"{own} against {package} of the package"))
    return found


def _equal(hexadecimal: str, decimal: str) -> bool:
    try:
        return int(hexadecimal, 16) == int(decimal)
    except ValueError:
        return False


def _check_card(home: Path, device: Path, key: str) -> list[Violation]:
    found, shown = [], f"/sys/bus/pci/devices/{key}.0"
    vendor = _text(device / "vendor")
    if vendor != "0x1002":
        found.append(Violation("vendor", f"{shown}/vendor", f"reads {vendor!r}"))
    names = sorted(os.listdir(device / "drm")) if (device / "drm").is_dir() else []
    render = [name for name in names if name.startswith("renderD")]
    if len(render) != 1:
        found.append(Violation("one-render", f"{shown}/drm", f"render nodes: {', '.join(render) or 'none'}"))
    cards = [name for name in names if name.startswith("card")]
    if not cards or not (home / "sys/class/drm" / cards[0]).exists():
        found.append(Violation("card-link", f"{shown}/drm", "no card of it in /sys/class/drm"))
    return found


def _check_render(home: Path, number: str | None, node: str) -> list[Violation]:
    found, name = [], f"renderD{number}"
    if not (home / "sys/class/drm" / name).exists():
        found.append(Violation("class-render", f"/sys/class/drm/{name}", f"not there, wanted by {node}"))
    try:
        os.close(os.open(home / "dev/dri" / name, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        found.append(Violation("dev-render", f"/dev/dri/{name}", error.strerror or "cannot be opened"))
    return found
