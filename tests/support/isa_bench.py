"""Runs a few gfx950 instructions on one wave whose registers the test sets, and shows the registers afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dieplace.emulator.isa import Buffer, Launch, LogicalDevice, PlainMemory, Program, RunStats
from dieplace.emulator.isa import run as run_checked
from dieplace.emulator.isa.dispatch import Dispatch
from dieplace.emulator.isa.execute import execute
from dieplace.emulator.isa.operands import EXEC, M0, SGPR, VCC

ALL = (1 << 64) - 1
VGPRS, AGPRS = 128, 64


def isa_text(body: str, *, name: str = "t", vgprs: int = VGPRS, agprs: int = 0, lds: int = 0, extra: str = "") -> str:
    """A complete kernel around `body`; agprs follow at the next multiple of 4."""
    lines = "\n".join(
        f"\t{line.strip()}" if not line.strip().endswith(":") else line.strip() for line in body.split("\n")
    )
    return (
        f"{name}:\n{lines}\n\ts_endpgm\n.Lfunc_end0:\n\t.amdhsa_kernel {name}\n"
        f"\t\t.amdhsa_group_segment_fixed_size {lds}\n\t\t.amdhsa_user_sgpr_count 2\n"
        f"\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1\n\t\t.amdhsa_system_sgpr_workgroup_id_x 1\n"
        f"\t\t.amdhsa_next_free_vgpr {vgprs + agprs}\n\t\t.amdhsa_accum_offset {vgprs}\n{extra}\t.end_amdhsa_kernel\n"
    )


@dataclass
class After:
    """Registers after a run: `v(n)` is 64 integers, `s(n)` and `s64(n)` integers."""

    st: Any
    fault: Exception | None = None

    def v(self, number: int) -> list[int]:
        return [int(x) for x in self.st.vgpr[number, 0]]

    def a(self, number: int) -> list[int]:
        return self.v(VGPRS + number)

    def v64(self, number: int) -> list[int]:
        return [low | high << 32 for low, high in zip(self.v(number), self.v(number + 1), strict=True)]

    def s(self, number: int) -> int:
        return int(self.st.sgpr[number >> 1, 0, number & 1])

    def s64(self, number: int) -> int:
        return self.s(number) | self.s(number + 1) << 32

    @property
    def vcc(self) -> int:
        return self.s64(VCC)

    @property
    def exec(self) -> int:
        return self.s64(EXEC)

    @property
    def scc(self) -> bool:
        return bool(self.st.scc[0])

    def lds(self, offset: int, size: int) -> bytes:
        return self.st.lds[0, offset : offset + size].tobytes()

    def is_written(self, key: int) -> bool:
        """No never-written bit in VGPR `key` (or `SGPR + n`)."""
        return not self.st.tainted >> key & 1 or not self.st.taint_row(key).any()


def run_wave(
    body: str,
    vgprs: dict[int, Any] | None = None,
    sgprs: dict[int, int] | None = None,
    *,
    exec_mask: int = ALL,
    vcc: int | None = None,
    scc: bool | None = None,
    m0: int | None = None,
    lds: bytes = b"",
    lds_size: int | None = None,
    buffers: tuple[Buffer, ...] = (),
    agprs: int = 0,
    memory: Any = None,
) -> After:
    """Run straight-line instructions on one wave; registers that are given are written, the rest is never-written."""
    size = max(lds_size or 0, len(lds))
    program = Program.parse(isa_text(body, agprs=agprs, lds=size), "t")
    launch = Launch(program, (1, 1, 1), (64, 1, 1), b"")
    dispatch = Dispatch(launch, 0, memory or PlainMemory(buffers), 1.0)
    waves = dispatch.fill(np.arange(1))
    st = dispatch.st
    for number, values in (vgprs or {}).items():
        st.vgpr[number, 0] = np.asarray(values, dtype=np.uint64).astype(np.uint32)
        st.drop_taint(number)
    pairs = {VCC: vcc, EXEC: exec_mask}
    scalars = dict(sgprs or {})
    for number, value in pairs.items():
        if value is not None:
            scalars |= {number: value & 0xFFFFFFFF, number + 1: value >> 32}
    if m0 is not None:
        scalars[M0] = m0
    for number, value in scalars.items():
        st.sgpr[number >> 1, 0, number & 1] = value & 0xFFFFFFFF
        st.drop_taint(SGPR + number)
    if scc is not None:
        st.scc[0] = scc
        st.drop_taint(SGPR + 253)
    if lds:
        st.lds[0, : len(lds)] = np.frombuffer(lds, np.uint8)
        st.lds_taint[0, : len(lds)] = 0
    group = dispatch.groups.group(waves)
    with np.errstate(all="ignore"):
        for block in program.blocks:
            execute(block, group)
    return After(st)


class HostArray:
    """Host memory that kernels may touch: 64-byte aligned, named, seen as a numpy array."""

    def __init__(self, name: str, values: Any) -> None:
        source = np.ascontiguousarray(values)
        self._raw = np.zeros(source.nbytes + 64, np.uint8)
        start = -self._raw.ctypes.data % 64
        self.array = self._raw[start : start + source.nbytes].view(source.dtype).reshape(source.shape)
        self.array[...] = source
        self.buffer = Buffer(name, self.array.ctypes.data, source.nbytes)

    @property
    def pointer(self) -> bytes:
        return int(self.buffer.base).to_bytes(8, "little")


def launch(
    body: str,
    *arrays: HostArray,
    grid: int = 1,
    block: int = 64,
    numbers: tuple[int, ...] = (),
    device: LogicalDevice | None = None,
    lds: int = 0,
    vgprs: int = 32,
    name: str = "t",
    stream: int = 0,
) -> Launch:
    """A launch whose arguments are the pointers of `arrays` (8 bytes each), then `numbers` (4 bytes each)."""
    kernarg = b"".join(a.pointer for a in arrays) + b"".join(n.to_bytes(4, "little") for n in numbers)
    text = isa_text(body, name=name, vgprs=vgprs, lds=lds)
    return Launch(
        Program.parse(text, name), (grid, 1, 1), (block, 1, 1), kernarg, device or LogicalDevice(), stream=stream
    )


def memory_of(*arrays: HostArray) -> PlainMemory:
    return PlainMemory([a.buffer for a in arrays])


def run(launches: list[Launch], memory: Any, **how: Any) -> RunStats:
    """Run programs that were written without waits, to be short; `test_isa_waits.py` tests the waits."""
    return run_checked(launches, memory, check_waits=False, **how)
