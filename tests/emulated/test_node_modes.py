"""Every part in every mode: what the tree says, against figures that AMD published or users measured."""

import re
import tarfile
from pathlib import Path

import pytest

from dieplace.emulator.node import check_tree, create
from dieplace.emulator.node.rules import automatic_compute, available_compute, modes_of, supported_compute
from dieplace.errors import NoSuchMode, UsageError
from dieplace.parts import PARTS, part_of_pci

RECORDED = Path(__file__).parents[3] / "shared/data/kfd-mi308x-8gpu-cpx.tar.gz"
ALL = [(name, str(mode)) for name, part in PARTS.items() for mode in modes_of(part.xccs, part.memory_caps, part.gfx)]
COUNTS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


def _properties(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}


def _gpus(root: Path) -> list[tuple[dict[str, int], dict[str, int]]]:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    found = []
    for number in sorted(map(int, (path.name for path in nodes.iterdir()))):
        head = _properties(nodes / str(number) / "properties")
        bank = nodes / str(number) / "mem_banks/0/properties"
        if head["cpu_cores_count"] == 0:
            found.append((head, _properties(bank) if bank.exists() else {}))
    return found


def test_the_modes_are_those_of_the_kernel_table() -> None:
    by_part = {name: [mode for part, mode in ALL if part == name] for name in PARTS}
    gfx950 = ["SPX/NPS1", "DPX/NPS1", "QPX/NPS1", "CPX/NPS1", "DPX/NPS2", "QPX/NPS2", "CPX/NPS2"]
    assert by_part["MI355X"] == by_part["MI350X"] == gfx950
    assert by_part["MI300X"] == [*gfx950[:4], "DPX/NPS2", "QPX/NPS4", "CPX/NPS4"]
    assert by_part["MI325X"] == gfx950[:4]
    assert by_part["MI350P"] == by_part["MI308X"] == ["SPX/NPS1", "DPX/NPS1", "CPX/NPS1"]
    assert by_part["MI300A"] == ["SPX/NPS1", "TPX/NPS1", "CPX/NPS1"]


@pytest.mark.parametrize(("name", "mode"), ALL)
def test_every_part_in_every_mode(tmp_path: Path, name: str, mode: str) -> None:
    cards, part = 3, PARTS[name]
    root = create(tmp_path / "node", name.lower(), cards, mode.lower(), cores_per_node=2).directory
    assert check_tree(root) == []
    count = COUNTS.get(mode[:3], part.xccs)
    gpus = _gpus(root)
    assert len(gpus) == cards * count
    for index, (head, bank) in enumerate(gpus):
        assert head["num_xcc"] == part.xccs // count
        assert head["location_id"] & 7 == index % count
        assert head["drm_render_minor"] == 128 + 8 * (index // count) + index % count
        if part.cus is None:
            assert "simd_count" not in head
        else:
            assert head["simd_count"] * count == 4 * part.cus
        if part.hbm_bytes is None:
            assert not bank
        else:
            assert bank["size_in_bytes"] == part.hbm_bytes // count
    assert len({(h["domain"], h["location_id"]) for h, _ in gpus}) == len(gpus)


@pytest.mark.parametrize(
    ("name", "mode", "simd", "size"),
    [
        ("MI300X", "DPX/NPS1", 608, 103_070_826_496),  # k8s-gpu-dra-driver issue 20
        ("MI300X", "CPX/NPS4", 152, 25_767_706_624),  # ROCm issue 4750
        ("MI308X", "CPX/NPS1", 80, 51_539_607_552),  # k8s-device-plugin testdata
        ("MI355X", "DPX/NPS2", 512, None),  # 128 CUs: AMD data sheet and amdgpu-docs
        ("MI355X", "CPX/NPS2", 128, None),
    ],
)
def test_figures_that_were_reported(tmp_path: Path, name: str, mode: str, simd: int, size: int | None) -> None:
    reserve = "last" if name == "MI308X" else "spread"
    head, bank = _gpus(create(tmp_path / "node", name, 1, mode, reserve=reserve, cores_per_node=2).directory)[0]
    assert head["simd_count"] == simd
    if size is not None:
        assert bank["size_in_bytes"] == size
    else:
        assert 2**30 * 288 * 0.999 < bank["size_in_bytes"] * (256 * 4 // simd) <= 2**30 * 288


@pytest.mark.recorded
def test_a_tree_like_the_recorded_one(tmp_path: Path) -> None:
    if not RECORDED.is_file():
        pytest.skip("the recorded MI308X topology is not part of a plain clone")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path / "real", filter="data")
    real = next((tmp_path / "real").rglob("nodes"))
    made = (
        create(tmp_path / "node", "MI308X", 8, "CPX/NPS1", reserve="last", cores_per_node=2).directory
        / "sys/class/kfd/kfd/topology/nodes"
    )
    assert sorted(p.name for p in real.iterdir()) == sorted(p.name for p in made.iterdir())
    unread = {"capability", "debug_prop", "fw_version", "sdma_fw_version"}  # not emulated: firmware of one day
    own = {"location_id", "domain", "hive_id", "unique_id", "drm_render_minor", "caches_count", "cpu_cores_count",
           "cpu_core_id_base", "simd_id_base"}  # fmt: skip
    for number in map(str, range(34)):
        ours, theirs = _properties(made / number / "properties"), _properties(real / number / "properties")
        assert theirs.keys() - ours.keys() <= unread and ours.keys() <= theirs.keys()
        assert {key: value for key, value in ours.items() if key not in own} == {
            key: value for key, value in theirs.items() if key not in own | unread
        }
        if int(number) > 1:
            assert ours["drm_render_minor"] == theirs["drm_render_minor"]
            assert (made / number / "mem_banks/0/properties").read_text() == (
                real / number / "mem_banks/0/properties"
            ).read_text()
        for kind in ("io_links", "p2p_links"):
            assert _links(made / number / kind) == _links(real / number / kind)


def _links(folder: Path) -> dict[int, tuple[int, ...]]:
    keys = ("type", "weight", "min_bandwidth", "max_bandwidth", "flags")
    items = [_properties(path / "properties") for path in folder.iterdir()]
    return {item["node_to"]: tuple(item[key] for key in keys) for item in items}


def test_automatic_mode_at_load() -> None:
    """aqua_vanjaram.c: 1 range SPX, a range an XCC CPX, a range two XCCs CPX (older: QPX; APU: TPX), 2 ranges DPX."""
    assert automatic_compute(8, 1, False, "newer") == "SPX"
    assert automatic_compute(8, 8, False, "newer") == "CPX"
    assert automatic_compute(8, 4, False, "newer") == "CPX"
    assert automatic_compute(8, 4, False, "older") == "QPX"
    assert automatic_compute(6, 3, True, "newer") == "TPX"
    assert automatic_compute(8, 2, False, "newer") == "DPX"
    assert automatic_compute(6, 4, True, "newer") is None


def test_lists_by_xcc_count_and_nps() -> None:
    assert [supported_compute(n) for n in (8, 6, 4, 2)] == [
        ("SPX", "DPX", "QPX", "CPX"), ("SPX", "TPX", "CPX"), ("SPX", "DPX", "CPX"), ("SPX", "CPX"),
    ]  # fmt: skip
    assert available_compute(8, 2, "gfx950", "newest") == ("DPX", "QPX", "CPX")
    assert available_compute(8, 2, "gfx950", "2025") == ("DPX",)
    assert available_compute(8, 2, "gfx942", "newest") == ("DPX",)


def test_parts_by_pci_id() -> None:
    assert part_of_pci(30115) is PARTS["MI355X"]  # KFD device_id of an MI355X, device-metrics-exporter issue 495
    assert part_of_pci(0x75B3) is PARTS["MI355X"]
    assert part_of_pci(0x74B5) is PARTS["MI300X"]
    assert part_of_pci(0x1234) is None
    assert part_of_pci(None) is None
    for part in PARTS.values():
        for field in ("cus_per_xcc", "dies", "stacks_per_die", "hbm_bytes"):
            assert getattr(part, field) is not None or re.search("[a-z]", part.whys[field])


@pytest.mark.parametrize(
    "words",
    [{"part": "MI999"}, {"cards": 0}, {"cards": 9}, {"cards": True}, {"mode": "XPX/NPS1"}, {"colour": "red"},
     {"unique_id": "odd"}, {"cpu_nodes": 0}, {"slow_start_s": -1}, {"nps_caps": ("NPS3",)}, {"vfio_cards": ("a",)}],
)  # fmt: skip
def test_a_wrong_word_is_refused(tmp_path: Path, words: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        create(tmp_path / "node", **words)  # type: ignore[arg-type]
    assert not (tmp_path / "node").exists()


def test_a_mode_that_the_part_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchMode, match="SPX/NPS2"):
        create(tmp_path / "node", mode="SPX/NPS2")
    with pytest.raises(NoSuchMode):
        create(tmp_path / "node", mode="CPX/NPS2", nps_table="2025")
