"""Every demand of libamd_smi 24.7 on a tree: the emulated node meets it, and breaking it is noticed.

The demands come from running AMD's library over trees with one thing broken; that library is not at hand here, so
each test breaks the tree in the same way and expects the checker to name that row.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dieplace.emulator.node import Node, check_tree, create

KFD = "sys/class/kfd/kfd"
NODES = f"{KFD}/topology/nodes"


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return create(tmp_path / "node", mode="DPX/NPS2")


def _card_becomes_folder(root: Path) -> None:
    target = root / "sys/class/drm/card0"
    real = target.resolve()
    target.unlink()
    target.mkdir()
    (target / "device").symlink_to(real.parent.parent)


def _card_link_without_bdf(root: Path) -> None:
    link = root / "sys/class/drm/card0"
    (root / "sys/devices/elsewhere").symlink_to(link.resolve().parent.parent)
    link.unlink()
    link.symlink_to("../../devices/elsewhere/drm/card0")


def _second_render(root: Path) -> None:
    (root / "sys/class/drm/card0").resolve().parent.joinpath("renderD190").mkdir()


def _no_render(root: Path) -> None:
    shutil.rmtree((root / "sys/class/drm/renderD128").resolve())


def _xcp_vendor(root: Path) -> None:
    (root / "sys/devices/platform/amdgpu_xcp_0/vendor").write_text("0x1002\n")


def _no_cards(root: Path) -> None:
    for name in os.listdir(root / "sys/class/drm"):
        if name.startswith("card"):
            (root / "sys/class/drm" / name).unlink()


def _other_unique_id(root: Path) -> None:
    path = (root / "sys/class/drm/card0/device").resolve() / "unique_id"
    path.chmod(0o644)
    path.write_text("0123456789abcdef\n")


def _edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        file = (root / path).resolve()
        text = file.read_text()
        assert old in text
        file.chmod(0o644)
        file.write_text(text.replace(old, new, 1))

    return act


def _remove(path: str) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        found = root / path
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()

    return act


BREAKS = [
    ("card-link", _card_becomes_folder),
    ("card-link", _card_link_without_bdf),
    ("one-render", _second_render),
    ("one-render", _no_render),
    ("class-render", _remove("sys/class/drm/renderD129")),
    ("class-render", _remove("sys/class/drm/renderD128")),
    ("dev-render", _remove("dev/dri/renderD128")),
    ("vendor", _edit("sys/class/drm/card0/device/vendor", "0x1002", "0x10de")),
    ("xcp-vendor", _xcp_vendor),
    ("some-card", _no_cards),
    ("unique-id", _other_unique_id),
    ("node-gap", _remove(f"{NODES}/5")),
    ("io-links", _remove(f"{NODES}/0/io_links")),
    ("io-links", _remove(f"{NODES}/17/io_links")),
    ("digits", _edit(f"{NODES}/2/properties", "num_gws 64", "num_gws sixty")),
    ("properties", _remove(f"{NODES}/3/properties")),
    ("gpu-id", _remove(f"{NODES}/3/gpu_id")),
    ("kfd-proc", _remove(f"{KFD}/proc")),
    ("initstate", _edit("sys/module/amdgpu/initstate", "live", "coming")),
    ("initstate", _remove("sys/module/amdgpu/initstate")),
] + [
    ("gpu-keys", _edit(f"{NODES}/2/properties", f"\n{key} ", f"\nnot_{key} "))
    for key in ("hive_id", "simd_arrays_per_engine", "array_count", "cu_per_simd_array", "location_id", "domain")
]


@pytest.mark.parametrize(("row", "break_it"), BREAKS, ids=lambda value: value if isinstance(value, str) else "")
def test_each_demand_is_met_and_its_breach_is_seen(node: Node, row: str, break_it: Callable[[Path], None]) -> None:
    assert check_tree(node.directory) == []
    break_it(node.directory)
    assert row in {violation.row for violation in check_tree(node.directory)}


@pytest.mark.parametrize("name", ["name", "mem_banks", "p2p_links", "caches"])
def test_what_the_library_does_not_need_may_be_missing(node: Node, name: str) -> None:
    _remove(f"{NODES}/2/{name}")(node.directory)
    assert check_tree(node.directory) == []


def test_a_render_node_that_cannot_be_opened_is_seen(node: Node) -> None:
    if os.geteuid() == 0:
        (node.directory / "dev/dri/renderD128").unlink()
        (node.directory / "dev/dri/renderD128").symlink_to("renderD128")  # ELOOP stops root too
    else:
        (node.directory / "dev/dri/renderD128").chmod(0)
    assert [v.row for v in check_tree(node.directory)] == ["dev-render"]


def test_distinct_unique_ids_lose_the_secondaries(tmp_path: Path) -> None:
    found = check_tree(create(tmp_path / "node", mode="DPX/NPS2", unique_id="distinct").directory)
    assert {violation.row for violation in found} == {"unique-id"}
    assert len(found) == 16
    assert check_tree(create(tmp_path / "whole", mode="SPX/NPS1", unique_id="distinct").directory) == []


def test_an_unloaded_driver_leaves_no_empty_class_folder_unless_asked(tmp_path: Path) -> None:
    node = create(tmp_path / "node")
    node.unload()
    assert {v.row for v in check_tree(node.directory)} == {"initstate"}
    stays = create(tmp_path / "stays", drm_stays=True)
    stays.unload()
    assert {v.row for v in check_tree(stays.directory)} == {"initstate", "some-card"}


def test_the_checker_survives_a_hostile_tree(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=1)
    file = node.directory / f"{NODES}/2/properties"
    file.chmod(0o644)
    file.write_bytes(b"\xff\xfe\n\x00 location_id\ndomain x\nlocation_id 99999999999999999999999\n")
    assert any(v.row == "digits" for v in check_tree(node.directory))
    assert check_tree(tmp_path / "nothing")[0].row == "initstate"
    assert errno.ENOENT  # the checker raised nothing
