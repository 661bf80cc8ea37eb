"""Architectural state of the resident waves of one launch, in arrays over all wave slots.

`vgpr` is uint32 [row, wave, lane] (AccVGPRs follow the VGPRs), `sgpr` is uint32 [pair, wave, half] so that an aligned
pair is one 64-bit word, EXEC included. `taints` holds, for every register that still has a never-written bit
somewhere, a mask of such bits; `tainted` is the set of those registers as bits of one integer, so that clean code pays
one test per block.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dieplace.emulator.isa.faults import NeverWritten
from dieplace.emulator.isa.flatbytes import FlatBytes
from dieplace.emulator.isa.operands import EXEC, SCC_BIT, SGPR
from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.emulator.isa.memory import MemoryPort
    from dieplace.emulator.isa.program import Program
    from dieplace.emulator.isa.request import Request

U16 = np.uint16
U8, U32, U64 = np.uint8, np.uint32, np.uint64
I32, I64, F32, F64 = np.int32, np.int64, np.float32, np.float64
ALL_BITS = U32(0xFFFFFFFF)
ALL_LANES = U64(0xFFFFFFFFFFFFFFFF)
SGPR_PAIRS = 128
LANES = 64


@dataclass(frozen=True)
class LogicalDevice:
    """What a launch runs on: physical XCDs in dispatch order, and what HW_REG_XCC_ID reads there.

    `xcc_id_base` is added to the position of the XCD in `xcds`: whether the second partition of a card reads 0-3 or
    4-7 is not documented, so it is a setting. 32 active CUs an XCD is MI355X (AMD CDNA 4 white paper).
    """

    name: str = "gpu0/p0"
    xcds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    cus_per_xcd: int = 32
    xcc_id_base: int = 0

    def __post_init__(self) -> None:
        if not self.xcds or len(set(self.xcds)) != len(self.xcds) or self.cus_per_xcd < 1:
            raise UsageError(f"a logical device needs distinct XCDs and at least one CU, got {self.xcds}")


@dataclass(frozen=True)
class Launch:
    """One kernel launch: grid in workgroups, block in work-items, kernel arguments as packed bytes.

    Launches of one (device, stream) run in list order; others run together.
    """

    program: Program
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    kernarg: bytes
    device: LogicalDevice = field(default_factory=LogicalDevice)
    dynamic_lds_bytes: int = 0
    stream: int = 0

    @property
    def workgroups(self) -> int:
        """Workgroups in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def waves_per_workgroup(self) -> int:
        """Waves of 64 work-items that one workgroup needs."""
        return -(-self.block[0] * self.block[1] * self.block[2] // LANES)


@dataclass
class Clock:
    """Emulated engine clock: four cycles a wave instruction group, monotonic over all launches of a run."""

    now: int = 0


class LaunchState:
    """Registers, LDS and placement of the `slots` workgroups of a launch that are resident at once."""

    def __init__(self, launch: Launch, index: int, slots: int, memory: MemoryPort) -> None:
        program = launch.program
        self.launch, self.program, self.device, self.index, self.memory = launch, program, launch.device, index, memory
        self.waves_per_workgroup = launch.waves_per_workgroup
        self.slots = slots
        self.waves = waves = slots * self.waves_per_workgroup
        self.vgpr = np.zeros((program.rows, waves, LANES), U32)
        self.sgpr = np.zeros((SGPR_PAIRS, waves, 2), U32)
        self.sgpr64 = self.sgpr.view(U64)[:, :, 0]
        self.scc = np.zeros(waves, bool)
        self.tainted = 0
        self.taints: dict[int, np.ndarray | None] = {}
        self.origins: dict[int, str] = {}
        slot = np.arange(waves) // self.waves_per_workgroup
        count = len(launch.device.xcds)
        self.slot = slot
        self.wave_in_workgroup = np.arange(waves) % self.waves_per_workgroup
        self.xcd = np.asarray(launch.device.xcds)[slot % count]
        self.xcc_id = (launch.device.xcc_id_base + slot % count).astype(U32)
        self.cu = slot // count % launch.device.cus_per_xcd
        self.workgroup = np.full(waves, -1, I64)
        self.lds_bytes = -(-(program.lds_bytes + launch.dynamic_lds_bytes) // 16) * 16
        self.lds = np.zeros((slots, max(self.lds_bytes, 16)), U8)
        self.lds_taint = np.full_like(self.lds, 0xFF)
        self.lds_bytes_store = FlatBytes(self.lds.reshape(-1))
        self.lds_taint_bytes = FlatBytes(self.lds_taint.reshape(-1))
        self.kernarg = np.frombuffer(launch.kernarg + bytes(-len(launch.kernarg) % 64 + 64), U8)
        self.kernarg_base = KERNARG_BASE + (index << 24)
        self.clock = Clock()
        self.choose: random.Random | None = None
        self.block_waves: dict[int, int] = {}
        self.recent: dict[int, tuple[Request, np.ndarray, int]] = {}

    def start(self, slots: np.ndarray, workgroups: np.ndarray) -> np.ndarray:
        """Give `workgroups` (linear ids) the free `slots`; sets the initial registers and returns their wave slots."""
        per = self.waves_per_workgroup
        waves = (slots[:, None] * per + np.arange(per)).reshape(-1)
        self.workgroup[waves] = np.repeat(workgroups, per)
        self._poison_registers(waves)
        self._set_vgprs(waves)
        self._set_sgprs(waves)
        self.lds_taint[slots] = 0xFF
        return waves

    def _set_vgprs(self, waves: np.ndarray) -> None:
        """v0 packs the work-item ids, 10 bits each (LLVM AMDGPU usage, "Initial Kernel Execution State", gfx90a)."""
        bx, by, bz = self.launch.block
        item = self.wave_in_workgroup[waves][:, None] * LANES + np.arange(LANES)
        packed = (item % bx) | (item // bx % by) << 10 | (item // (bx * by)) << 20
        self.vgpr[0, waves] = packed.astype(U32)
        self._clean(0, waves)
        lanes = (item < bx * by * bz).astype(U8)
        self.sgpr64[EXEC >> 1, waves] = np.packbits(lanes, axis=1, bitorder="little").view(U64)[:, 0]
        for key in (SGPR + EXEC, SGPR + EXEC + 1):
            self._clean(key, waves)

    def _set_sgprs(self, waves: np.ndarray) -> None:
        gx, gy, _ = self.launch.grid
        ids = self.workgroup[waves]
        values = {"x": ids % gx, "y": ids // gx % gy, "z": ids // (gx * gy)}
        values["kernarg_lo"] = np.full(len(waves), self.kernarg_base & 0xFFFFFFFF)
        values["kernarg_hi"] = np.full(len(waves), self.kernarg_base >> 32)
        for number, what in enumerate(self.program.initial_sgprs):
            if what is None:
                continue
            if isinstance(what, int):
                value: np.ndarray = np.full(len(waves), int(self.kernarg[what : what + 4].view(U32)[0]))
            else:
                value = values[what]
            self.sgpr[number >> 1, waves, number & 1] = value.astype(U32)
            self._clean(SGPR + number, waves)

    def _poison_registers(self, waves: np.ndarray) -> None:
        keys = [*range(self.program.rows), *(SGPR + n for n in range(SGPR_PAIRS * 2)), SGPR + SCC_BIT]
        if len(waves) == self.waves:
            self.taints = dict.fromkeys(keys)
            self.tainted = sum(1 << key for key in self.taints)
            self.origins = {}
            return
        for key in keys:
            self.taint_row(key)[waves] = ALL_BITS

    def taint_row(self, key: int) -> np.ndarray:
        """The mask of never-written bits of one register, made when it is not there: [wave, lane] or [wave]."""
        shape = (self.waves, LANES) if key < SGPR else (self.waves,)
        if not self.tainted >> key & 1:
            self.taints[key] = np.zeros(shape, U32)
            self.tainted |= 1 << key
        elif self.taints[key] is None:
            self.taints[key] = np.full(shape, ALL_BITS)
        row = self.taints[key]
        assert row is not None
        return row

    def drop_taint(self, key: int) -> None:
        """Forget the mask of a register that is written everywhere."""
        self.tainted &= ~(1 << key)
        self.taints.pop(key, None)
        self.origins.pop(key, None)

    def _clean(self, key: int, waves: np.ndarray) -> None:
        if len(waves) == self.waves:
            self.drop_taint(key)
            return
        row = self.taint_row(key)
        row[waves] = 0
        if not row.any():
            self.drop_taint(key)

    def origin(self, key: int) -> str:
        """Where the never-written bits of a register come from, in words."""
        return self.origins.get(key) or f"{self.program.register_name(key)}, which was never written"

    def never_written_memory(self, what: str, origin: str) -> NeverWritten:
        """The fault for `what` depending on memory or LDS that nothing has written."""
        return NeverWritten(f"{what} depends on {origin}", hint="write it before it is read", origin=origin)

    def never_written(self, what: str, key: int) -> NeverWritten:
        """The fault for `what` depending on the register `key`."""
        origin = self.origin(key)
        return NeverWritten(
            f"{what} depends on {origin}", hint="write it on every path and in every lane first", origin=origin
        )


# Kernel arguments live outside every buffer, below any address that a host allocator hands out.
KERNARG_BASE = 1 << 33
