"""Operands of the ISA text: registers, constants, and the keys under which a wave group finds their values.

A key is one integer: a VGPR row (AccVGPRs follow the VGPRs), `SGPR + n`, or `CONST | bits` for a constant.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from dieplace.emulator.isa.faults import UnknownInstruction

SGPR = 1 << 10
CONST = 1 << 80
SCC_BIT = 253
VCC, M0, EXEC = 106, 124, 126

# Scalar register names and their encodings (AMD Instinct MI300 ISA guide, table "SGPR encodings").
SPECIAL = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1),
    "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2), "xnack_mask_lo": (104, 1), "xnack_mask_hi": (105, 1),
}  # fmt: skip

_REGISTER = re.compile(r"^([vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
_INTEGER = re.compile(r"^-?(?:0x[0-9a-fA-F]+|\d+)$")
_FLOAT = re.compile(r"^-?\d+\.\d*(?:e[-+]?\d+)?$")


@dataclass(frozen=True)
class Operand:
    """One operand: kind `v`, `a`, `s`, `const`, `off` or `word` (label, hwreg, ... kept as text)."""

    kind: str
    text: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    negate: bool = False
    absolute: bool = False
    sext: bool = False

    @property
    def is_modified(self) -> bool:
        """True with a sign, absolute-value or sign-extension modifier."""
        return self.negate or self.absolute or self.sext


def parse_operand(text: str) -> Operand:
    """Read one operand; what is neither register nor number becomes kind `word` and is judged by its instruction."""
    bare, negate, absolute, sext = text, False, False, False
    if bare.startswith("sext(") and bare.endswith(")"):
        bare, sext = bare[5:-1], True
    if bare.startswith("neg(") and bare.endswith(")"):
        bare, negate = bare[4:-1], True
    elif bare.startswith("-") and not (_INTEGER.match(bare) or _FLOAT.match(bare)):
        bare, negate = bare[1:], True
    if bare.startswith("|") and bare.endswith("|") and len(bare) > 2:
        bare, absolute = bare[1:-1], True
    elif bare.startswith("abs(") and bare.endswith(")"):
        bare, absolute = bare[4:-1], True
    kind, index, count, value = _classify(bare)
    return Operand(kind, text, index, count, value, negate, absolute, sext)


def _classify(bare: str) -> tuple[str, int, int, int | float]:
    if match := _REGISTER.match(bare):
        first = int(match.group(2) or match.group(3))
        last = int(match.group(4)) if match.group(4) else first
        return match.group(1), first, last - first + 1, 0
    if bare in SPECIAL:
        return "s", *SPECIAL[bare], 0
    if _INTEGER.match(bare):
        return "const", 0, 1, int(bare, 0)
    if _FLOAT.match(bare):
        return "const", 0, 1, float(bare)
    return ("off", 0, 1, 0) if bare == "off" else ("word", 0, 1, 0)


def constant_bits(operand: Operand, kind: str) -> int:
    """The bits a constant has as an operand of type `kind` (u32, f32, f16, f64, u64, ...).

    Inline floats take the operand's own format; integers are sign-extended; a 32-bit literal of an f64 operand is its
    upper half (AMD Instinct MI300 ISA guide, section "Literal constants").
    """
    value = operand.value
    if isinstance(value, float):
        if kind in ("f64", "b64f"):
            return int(struct.unpack("<Q", struct.pack("<d", value))[0])
        if kind in ("f16", "pkf16"):
            return int(struct.unpack("<H", struct.pack("<e", value))[0])
        if kind in ("bf16", "pkbf16"):
            return int(struct.unpack("<I", struct.pack("<f", value))[0]) >> 16
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if kind == "f64" and not -16 <= value <= 64:
        return (value & 0xFFFFFFFF) << 32
    return value & (0xFFFFFFFFFFFFFFFF if kind in ("u64", "i64", "f64") else 0xFFFFFFFF)


def require_register(operand: Operand, files: str, words: int, what: str) -> Operand:
    """The operand itself when it is a register of one of `files` with `words` registers; else UnknownInstruction."""
    if operand.kind not in files or operand.count != words:
        raise UnknownInstruction(f"{what}: operand {operand.text!r} is not {words} register(s) of file {files}")
    return operand
