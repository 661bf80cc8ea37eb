"""The opcode table, and what building an instruction yields: a `Step` that runs it on a wave group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dieplace.emulator.isa.operands import CONST, SGPR, Operand, constant_bits

if TYPE_CHECKING:
    from dieplace.emulator.isa.group import Group
    from dieplace.emulator.isa.parse import Instruction

Run = Callable[["Group"], None]


@dataclass(frozen=True, eq=False)
class Step:
    """One built instruction: `run` ignores never-written bits, `slow` tracks them; reads and writes are sets of
    keys.
    """

    inst: Instruction
    kind: str
    run: Run | None
    slow: Run | None = None
    reads: int = 0
    writes: int = 0
    ends: str = ""  # "", "branch", "barrier", "sleep", "end": what follows cannot run in the same breath
    target: str = ""  # label of a branch
    taken: Callable[[Group], object] | None = None  # bool or bool [n]: does the branch go to its target
    preemptible: bool = False  # a memory instruction whose order against other waves can matter


@dataclass(frozen=True)
class Layout:
    """Register allocation of one kernel, as far as building instructions needs it."""

    vgprs: int
    agprs: int
    sgprs: int = 104

    @property
    def rows(self) -> int:
        """Rows of the register file: VGPRs, then AccVGPRs."""
        return self.vgprs + self.agprs

    def key(self, inst: Instruction, operand: Operand, kind: str = "u32", words: int = 1) -> int:
        """The bank key of an operand's first word; registers beyond the allocation are refused."""
        if operand.kind == "const":
            return CONST | constant_bits(operand, kind)
        if operand.kind not in "vas" or operand.kind == "":
            raise inst.unknown(f"operand {operand.text!r} is no register and no number")
        if operand.count != words:
            raise inst.unknown(f"operand {operand.text!r} has {operand.count} registers where {words} are needed")
        if operand.kind == "s":
            return SGPR + operand.index
        limit = self.vgprs if operand.kind == "v" else self.agprs
        if operand.index + words > limit:
            raise inst.unknown(f"{operand.text!r} is beyond the {limit} registers that the kernel allocates")
        return operand.index + (self.vgprs if operand.kind == "a" else 0)

    def register(self, inst: Instruction, operand: Operand, files: str, words: int) -> int:
        """The key of a register operand that must be of one of `files` and `words` long."""
        if operand.kind not in files:
            raise inst.unknown(f"operand {operand.text!r} must be a register of file {' or '.join(files)}")
        return self.key(inst, operand, "u32", words)


Builder = Callable[["Instruction", Layout], Step]


@dataclass(frozen=True)
class Opcode:
    """One mnemonic: how it is built, what it counts as, and the modifiers that its text may carry."""

    name: str
    kind: str
    build: Builder
    modifiers: frozenset[str] = field(default_factory=frozenset)


OPCODES: dict[str, Opcode] = {}


def bound(builder: Callable[..., Step], *arguments: Any) -> Builder:
    """A builder with its arguments after (instruction, layout) fixed."""
    return lambda inst, layout: builder(inst, layout, *arguments)


def add(names: str, kind: str, build: Builder, modifiers: Iterable[str] = ()) -> None:
    """Register a builder under each of the space-separated mnemonics."""
    for name in names.split():
        if name in OPCODES:
            raise AssertionError(f"{name} is defined twice")
        OPCODES[name] = Opcode(name, kind, build, frozenset(modifiers))


def build(inst: Instruction, layout: Layout) -> Step:
    """Build one instruction; an unknown mnemonic or a modifier it does not take is an error that names it."""
    opcode = OPCODES.get(inst.opcode)
    if opcode is None:
        raise inst.unknown(f"mnemonic {inst.opcode} is not known")
    for name in inst.modifiers:
        if name not in opcode.modifiers:
            raise inst.unknown(f"modifier {name} is not known for {inst.opcode}")
    return opcode.build(inst, layout)


def mask_of(keys: Iterable[int]) -> int:
    """A set of register keys as bits of one integer; constants fall out."""
    bits = 0
    for key in keys:
        if key < CONST:
            bits |= 1 << key
    return bits
