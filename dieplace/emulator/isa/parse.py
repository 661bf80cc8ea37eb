"""From a line of gfx950 assembly to an `Instruction`: mnemonic, operands, modifiers, and its line in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dieplace.emulator.isa.faults import UnknownInstruction
from dieplace.emulator.isa.operands import Operand, parse_operand

FLAGS = frozenset({"offen", "idxen", "lds", "sc0", "sc1", "nt", "gds", "clamp", "row_mirror", "row_half_mirror"})
NUMBERS = frozenset({
    "offset", "offset0", "offset1", "cbsz", "blgp", "abid", "row_mask", "bank_mask", "bound_ctrl", "row_shl", "row_shr",
    "row_ror", "row_bcast", "row_newbcast", "wave_shl", "wave_shr", "wave_rol", "wave_ror", "mul", "div", "bitop3",
})  # fmt: skip
LISTS = frozenset({"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "quad_perm", "neg"})
WORDS = frozenset({"dst_sel", "dst_unused", "src0_sel", "src1_sel"})

ModifierValue = int | str | tuple[int, ...]

# Instructions whose operand is a list of its own: kept as one word for the instruction to read.
_RAW = frozenset({"s_waitcnt", "s_waitcnt_depctr", "s_sendmsg", "s_sendmsghalt", "s_delay_alu", "s_set_gpr_idx_on"})
_MODIFIER = re.compile(r"^([a-z_0-9]+)(?::(.+))?$")


@dataclass(frozen=True)
class Instruction:
    """One parsed instruction; `line` counts from 1 in the ISA text."""

    opcode: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, ModifierValue]
    text: str
    line: int
    kind: str = field(default="", compare=False)

    @property
    def sc0(self) -> bool:
        """Cache bit sc0 is set."""
        return "sc0" in self.modifiers

    @property
    def sc1(self) -> bool:
        """Cache bit sc1 is set."""
        return "sc1" in self.modifiers

    @property
    def nt(self) -> bool:
        """The non-temporal bit is set."""
        return "nt" in self.modifiers

    def number(self, name: str, default: int = 0) -> int:
        """A numeric modifier."""
        value = self.modifiers.get(name, default)
        if not isinstance(value, int):
            raise self.unknown(f"modifier {name} is not a number: {value!r}")
        return value

    def bits(self, name: str, count: int, default: int) -> tuple[int, ...]:
        """A list modifier such as op_sel, filled up to `count` entries with `default`."""
        value = self.modifiers.get(name, ())
        if not isinstance(value, tuple):
            raise self.unknown(f"modifier {name} is not a list: {value!r}")
        return value + (default,) * (count - len(value))

    def unknown(self, what: str) -> UnknownInstruction:
        """The error that names this instruction and what is not known about it."""
        return UnknownInstruction(
            f"line {self.line}: `{self.text}`: {what}",
            hint="the interpreter guesses nothing; add the instruction to dieplace/emulator/isa",
            line=self.line,
            instruction=self.text,
            opcode=self.opcode,
        )


def parse_instruction(text: str, line: int) -> Instruction:
    """Read one instruction without comment or label; UnknownInstruction names what cannot be read."""
    opcode, _, rest = text.strip().partition(" ") if " " in text.strip() else text.strip().partition("\t")
    rest = rest.strip()
    if opcode in _RAW:
        return Instruction(opcode, (Operand("word", rest),), {}, text.strip(), line)
    parts = _split(rest, ",")
    tokens = _split(parts.pop(), " ") if parts else []
    modifiers: dict[str, ModifierValue] = {}
    while tokens and (pair := _modifier(tokens[-1])):
        modifiers[pair[0]] = pair[1]
        tokens.pop()
    if len(tokens) > 1:
        raise Instruction(opcode, (), {}, text.strip(), line).unknown(f"modifier {tokens[-1]!r} is not known")
    operands = tuple(parse_operand(part) for part in parts + tokens)
    return Instruction(opcode, operands, modifiers, text.strip(), line)


def _modifier(token: str) -> tuple[str, ModifierValue] | None:
    match = _MODIFIER.match(token)
    if match is None:
        return None
    name, value = match.groups()
    if value is None:
        return (name, 1) if name in FLAGS else None
    if name in NUMBERS:
        return name, value if value.startswith("swizzle(") else int(value, 0)
    if name in LISTS:
        return name, tuple(int(item, 0) for item in value.strip("[]").split(","))
    return (name, value) if name in WORDS else None


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside brackets and parentheses."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == separator and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    parts.append(current)
    return [part.strip() for part in parts if part.strip()]
