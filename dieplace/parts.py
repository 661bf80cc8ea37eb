"""The accelerator parts dieplace knows by PCI id, as plain data with a source for each figure.

A part is recognised by its PCI device id only, never by a CU count: a partitioned MI355X shows 128 CUs, and
choosing by that number has broken software before (aiter issue 2325). What could not be read in a public source
stays None, and `whys` says so; nothing here is a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

GIB = 1 << 30
FIRMWARE_RESERVE_BYTES = 16 << 20  # what the partitions of MI300X and MI308X together fall short of 192 GiB
_SPEC_TABLE = "rocprofiler-compute mi_gpu_spec.yaml; AMD data sheets"
_CDNA3_VF, _CDNA4_VF = 0x14, 0x10  # what a virtual function adds to the PCI id

_NO_BYTES = "not measured; nominal capacity less the 16 MiB that MI300X keeps back"
_NOT_READ = "no public source was read for this part"


@dataclass(frozen=True)
class Part:
    """One accelerator model.

    `hbm_bytes` is what the driver reports for the whole package; `memory_caps` are the NPS modes that its firmware
    offers (empty: switching is not offered, the file is read-only). `whys` maps a field to why it is None or inferred.
    """

    name: str
    pci_id: int
    vf_pci_id: int | None
    gfx: str
    gfx_target_version: int
    xccs: int
    cus_per_xcc: int | None
    dies: int | None  # I/O dies
    stacks_per_die: int | None
    hbm_bytes: int | None
    memory_caps: tuple[str, ...]
    hive: bool = True  # cards of a node are joined by xGMI
    apu: bool = False
    cu_slots_per_array: int = 10  # physical CUs of one shader array, before harvesting
    decoders: int | None = None  # video decode instances in SPX
    jpeg_rings_per_decoder: int | None = None
    xgmi_mb_per_s: int | None = None  # one link, one direction
    engine_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    whys: dict[str, str] = field(default_factory=dict)
    source: str = _SPEC_TABLE

    @property
    def cus(self) -> int | None:
        """CUs of the whole package."""
        return None if self.cus_per_xcc is None else self.xccs * self.cus_per_xcc

    @property
    def pci_name(self) -> str:
        """The board name that sysfs `product_name` shows."""
        return f"AMD Instinct {self.name}{' OAM' if self.hive and not self.apu else ''}"


def _cdna3(name: str, pci_id: int, xccs: int, cus: int, gib: int, caps: tuple[str, ...], **more: object) -> Part:
    base = {"dies": 4, "stacks_per_die": 2, "decoders": 4, "jpeg_rings_per_decoder": 8, "xgmi_mb_per_s": 64000}
    fields = {**base, "hbm_bytes": gib * GIB - FIRMWARE_RESERVE_BYTES, **more}
    return Part(name, pci_id, pci_id + _CDNA3_VF, "gfx942", 90402, xccs, cus, memory_caps=caps, **fields)  # type: ignore[arg-type]


def _cdna4(name: str, pci_id: int, clock_mhz: int) -> Part:
    return Part(
        name, pci_id, pci_id + _CDNA4_VF, "gfx950", 90500, 8, 32, 2, 4, 288 * GIB - FIRMWARE_RESERVE_BYTES,
        ("NPS1", "NPS2"), cu_slots_per_array=9, xgmi_mb_per_s=76800, engine_clock_mhz=clock_mhz,
        whys={
            "hbm_bytes": _NO_BYTES,
            "decoders": _NOT_READ,
            "jpeg_rings_per_decoder": "differs from MI300X; no public source was read",
            "cu_slots_per_array": "36 CU slots an XCD in the CDNA 4 white paper, over 4 arrays as on MI300X",
        },
        source=f"{_SPEC_TABLE}; PCI id also device-metrics-exporter issue 495; modes: amdgpu-docs partition matrix",
    )  # fmt: skip


_ALL = (
    _cdna4("MI355X", 0x75A3, 2400),
    _cdna4("MI350X", 0x75A0, 2200),
    Part(
        "MI350P", 0x75A8, 0x75B8, "gfx950", 90500, 4, None, None, None, None, ("NPS1",), hive=False,
        cu_slots_per_array=9,
        whys={name: _NOT_READ for name in ("cus_per_xcc", "dies", "stacks_per_die", "hbm_bytes", "decoders")},
    ),
    _cdna3("MI325X", 0x74A5, 8, 38, 256, ("NPS1",), engine_clock_mhz=2100, whys={"hbm_bytes": _NO_BYTES}),
    _cdna3("MI300X", 0x74A1, 8, 38, 192, ("NPS1", "NPS2", "NPS4"), engine_clock_mhz=2100, memory_clock_mhz=1300,
           source=f"{_SPEC_TABLE}; bytes: k8s-gpu-dra-driver issue 20, ROCm issue 4750; engines: amdsmi issue 132"),
    _cdna3("MI308X", 0x74A2, 4, 20, 192, ("NPS1",), engine_clock_mhz=1420, memory_clock_mhz=1300,
           dies=None, stacks_per_die=None, decoders=None, jpeg_rings_per_decoder=None,
           whys={"dies": _NOT_READ, "stacks_per_die": _NOT_READ, "decoders": _NOT_READ},
           source="k8s-device-plugin testdata/topology-parsing-mi308 (a recorded node)"),
    _cdna3("MI300A", 0x74A0, 6, 38, 128, (), apu=True, hbm_bytes=128 * GIB, decoders=None,
           jpeg_rings_per_decoder=None, engine_clock_mhz=2100,
           whys={"hbm_bytes": "unified with the host; nominal 128 GiB", "dies": "4; one site guide says 3",
                 "decoders": _NOT_READ}),
)  # fmt: skip

PARTS: MappingProxyType[str, Part] = MappingProxyType({part.name: part for part in _ALL})


def part_of_pci(device_id: int | None) -> Part | None:
    """The part with this PCI device id, its virtual function included; None where it is not one we know."""
    return next((part for part in _ALL if device_id is not None and device_id in (part.pci_id, part.vf_pci_id)), None)
