"""Branches, barriers, waits, hardware registers and clocks (AMD Instinct MI300 ISA guide, SOPP, SOPK, SMEM)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from dieplace.emulator.isa.group import SCC_KEY, Group
from dieplace.emulator.isa.operands import EXEC, SGPR, VCC, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.request import Request
from dieplace.emulator.isa.salu import scalar_target
from dieplace.emulator.isa.state import U32, U64
from dieplace.emulator.isa.table import Layout, Run, Step, add, bound, mask_of

VCC_KEYS = (SGPR + VCC, SGPR + VCC + 1)

# Hardware registers by name and by number (LLVM AMDGPU assembler syntax, "hwreg"); the rest is refused by name.
HARDWARE_REGISTERS = {4: "HW_REG_HW_ID", 20: "HW_REG_XCC_ID"}
_HWREG = re.compile(r"^hwreg\(\s*(\w+)\s*(?:,\s*(\d+)\s*,\s*(\d+)\s*)?\)$")
_COUNTER = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")

REAL_TIME_DIVIDER = 24  # 100 MHz constant clock against a 2.4 GHz engine clock (MI355X data sheet: 2.4 GHz peak)


def _label(inst: Instruction) -> str:
    if len(inst.operands) != 1 or inst.operands[0].kind not in ("word", "const"):
        raise inst.unknown("a branch takes one label")
    return inst.operands[0].text


def _branch(name: str, taken: Any, keys: tuple[int, ...], what: str) -> None:
    def build(inst: Instruction, layout: Layout) -> Step:
        reads = mask_of(keys)

        def check(g: Group) -> None:
            if g.st.tainted & reads:
                _require_decided(g, name, keys, what)

        return Step(inst, "branch", _nothing, check, reads, ends="branch", target=_label(inst), taken=taken)

    add(name, "branch", build)


def _require_decided(g: Group, name: str, keys: tuple[int, ...], what: str) -> None:
    """A branch on VCC being zero is decided by any written bit that is 1."""
    if keys != VCC_KEYS:
        g.require_written(keys, what, lanes=False)
        return
    value = g.s64[VCC >> 1]
    known = np.zeros(g.n, U64)
    bits = [g.taint(key) for key in keys]
    for half, tainted in enumerate(bits):
        if tainted is not None:
            known |= tainted[:, 0].astype(U64) << U64(32 * half)
    undecided = (known != 0) & ((value & ~known) == 0)
    if undecided.any():
        raise g.st.never_written(what, keys[0] if bits[0] is not None else keys[1])


def _nothing(g: Group) -> None:
    return None


def _define_branches() -> None:
    _branch("s_branch", None, (), "the branch")
    _branch("s_cbranch_scc0", lambda g: ~g.scc, (SCC_KEY,), "the branch on SCC")
    _branch("s_cbranch_scc1", lambda g: g.scc.copy(), (SCC_KEY,), "the branch on SCC")
    _branch("s_cbranch_vccz", lambda g: g.s64[VCC >> 1] == 0, VCC_KEYS, "the branch on VCC")
    _branch("s_cbranch_vccnz", lambda g: g.s64[VCC >> 1] != 0, VCC_KEYS, "the branch on VCC")
    _branch("s_cbranch_execz", lambda g: g.s64[EXEC >> 1] == 0, (), "the branch on EXEC")
    _branch("s_cbranch_execnz", lambda g: g.s64[EXEC >> 1] != 0, (), "the branch on EXEC")


def _build_end(inst: Instruction, layout: Layout, kind: str, ends: str) -> Step:
    return Step(inst, kind, _nothing, ends=ends)


def _define_ends() -> None:
    for name, ends, kind in (("s_endpgm", "end", "control"), ("s_barrier", "barrier", "barrier"),
                             ("s_sleep", "sleep", "control")):  # fmt: skip
        add(name, kind, bound(_build_end, kind, ends))


def _define_hints() -> None:
    """Instructions without an effect on values: alignment, priority, instruction cache."""
    names = ("s_nop s_setprio s_clause s_code_end s_set_gpr_idx_off s_icache_inv s_dcache_inv s_dcache_wb "
             "s_inst_prefetch s_ttracedata s_setkill s_sethalt s_wakeup s_incperflevel s_decperflevel")  # fmt: skip
    refused = {
        "s_set_gpr_idx_off",
        "s_setkill",
        "s_sethalt",
        "s_ttracedata",
        "s_inst_prefetch",
        "s_clause",
        "s_code_end",
    }
    for name in names.split():
        if name not in refused:
            add(name, "control", lambda inst, layout: Step(inst, "control", None))


def wait_counts(inst: Instruction) -> tuple[int | None, int | None]:
    """vmcnt and lgkmcnt of an s_waitcnt; None where the instruction does not wait on that counter."""
    text = inst.operands[0].text
    counters = {name: int(count) for name, count in _COUNTER.findall(text)}
    if _COUNTER.sub("", text).replace("&", "").strip():
        if not re.fullmatch(r"(0x[0-9a-fA-F]+|\d+)", text):
            raise inst.unknown(f"wait {text!r} cannot be read")
        counters = _decode_waitcnt(int(text, 0))
    return counters.get("vmcnt"), counters.get("lgkmcnt")


def _build_waitcnt(inst: Instruction, layout: Layout) -> Step:
    """s_waitcnt: memory results are in registers already; a port that delays write-backs is told."""
    vmcnt, lgkmcnt = wait_counts(inst)

    def wait(g: Group) -> None:
        memory = g.st.memory
        if memory.wants_waits:
            memory.wait(Request.of_waves(g, inst), vmcnt, lgkmcnt)

    return Step(inst, "wait", wait)


def _decode_waitcnt(value: int) -> dict[str, int]:
    """Fields of the immediate on GFX9: vmcnt [3:0] and [15:14], expcnt [6:4], lgkmcnt [11:8] (MI300 ISA guide)."""
    fields = {"vmcnt": (value & 0xF) | (value >> 14 & 3) << 4, "lgkmcnt": value >> 8 & 0xF}
    return {name: count for name, count in fields.items() if count != {"vmcnt": 63, "lgkmcnt": 15}[name]}


# ---- hardware registers


def _parse_hwreg(inst: Instruction, operand: Operand) -> tuple[str, int, int]:
    if operand.kind == "const" and not isinstance(operand.value, float):
        number, offset, size = operand.value & 0x3F, operand.value >> 6 & 0x1F, (operand.value >> 11 & 0x1F) + 1
        return HARDWARE_REGISTERS.get(number, f"number {number}"), offset, size
    match = _HWREG.match(operand.text)
    if match is None:
        raise inst.unknown(f"operand {operand.text!r} is no hardware register")
    name = match.group(1)
    if name.isdigit():
        name = HARDWARE_REGISTERS.get(int(name), f"number {name}")
    return name, int(match.group(2) or 0), int(match.group(3) or 32)


def hardware_id(st: Any, waves: np.ndarray) -> np.ndarray:
    """HW_ID: wave slot [3:0], SIMD [5:4], CU [11:8], shader engine [15:13] (MI300 ISA guide, "HW_ID"); 8 CUs an
    engine.
    """
    place, cu = st.wave_in_workgroup[waves], st.cu[waves]
    return (place // 4 % 10 | place % 4 << 4 | cu % 8 << 8 | cu // 8 % 8 << 13).astype(U32)


def _build_getreg(inst: Instruction, layout: Layout) -> Step:
    if len(inst.operands) != 2:
        raise inst.unknown("s_getreg_b32 takes a destination and a hardware register")
    name, offset, size = _parse_hwreg(inst, inst.operands[1])
    if name not in HARDWARE_REGISTERS.values():
        raise inst.unknown(f"hardware register {name} is not modelled")
    write, keys = scalar_target(inst, layout, inst.operands[0], "u32")
    field = U32((1 << size) - 1)

    def read(g: Group) -> None:
        value = g.st.xcc_id[g.waves] if name == "HW_REG_XCC_ID" else hardware_id(g.st, g.waves)
        write(g, (value >> U32(offset)) & field)

    return Step(inst, "salu", read, clearing(read, keys), 0, mask_of(keys))


def clearing(run: Run, keys: tuple[int, ...]) -> Run:
    """The tracking form of an instruction whose scalar results are always written."""

    def slow(g: Group) -> None:
        run(g)
        for key in keys:
            g.set_scalar_taint(key, None)

    return slow


def _build_setreg(inst: Instruction, layout: Layout) -> Step:
    """MODE may be set to what it already is: round to nearest even, denormals on; anything else is refused."""
    name, offset, size = _parse_hwreg(inst, inst.operands[0])
    value = inst.operands[1]
    is_default = value.kind == "const" and (offset, size, value.value) in ((4, 4, 15), (4, 2, 3), (6, 2, 3), (0, 4, 0))
    if name != "HW_REG_MODE" or not is_default:
        raise inst.unknown("only setting the default floating-point mode is modelled")
    return Step(inst, "salu", None)


def _clock(name: str, divider: int) -> None:
    def build(inst: Instruction, layout: Layout) -> Step:
        write, keys = scalar_target(inst, layout, inst.operands[0], "u64")

        def read(g: Group) -> None:
            write(g, U64(g.tick() // divider))

        return Step(inst, "smem", read, clearing(read, keys), 0, mask_of(keys))

    add(name, "smem", build)


_define_branches()
_define_ends()
_define_hints()
add("s_waitcnt", "wait", _build_waitcnt)
add("s_getreg_b32", "salu", _build_getreg)
add("s_setreg_imm32_b32", "salu", _build_setreg)
_clock("s_memtime", 1)
_clock("s_memrealtime", REAL_TIME_DIVIDER)
