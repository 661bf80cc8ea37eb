"""A kernel as the interpreter runs it: parsed from ISA text, built into steps, and cut into blocks."""

from __future__ import annotations

import gc
import itertools
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import dieplace.emulator.isa.opcodes  # noqa: F401  (fills the opcode table)
from dieplace.emulator.isa.metadata import KernelArgument, Metadata, parse_metadata
from dieplace.emulator.isa.operands import SGPR
from dieplace.emulator.isa.parse import Instruction, parse_instruction
from dieplace.emulator.isa.table import Layout, Run, Step, build
from dieplace.emulator.isa.waits import Hazard
from dieplace.errors import CompileError, UsageError

_LABEL = re.compile(r"^([.\w$]+):\s*$")


@dataclass(eq=False)
class Block:
    """Steps that run without interruption; `fast` and `slow` hold the same steps without and with taint tracking."""

    index: int
    steps: list[Step]
    fast: list[Run] = field(default_factory=list)
    slow: list[Run] = field(default_factory=list)
    run_steps: list[Step] = field(default_factory=list)
    touched: int = 0
    rows: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    target: int = -1
    ends: str = ""
    progresses: bool = False
    yields: bool = False  # a seeded run may interrupt after this block

    def finish(self) -> None:
        """Derive what execution needs from the steps."""
        self.run_steps = [step for step in self.steps if step.run is not None]
        self.fast = [step.run for step in self.run_steps if step.run is not None]
        self.slow = [step.slow or _tracking(step) for step in self.run_steps]
        writes = 0
        for step in self.steps:
            self.touched |= step.reads | step.writes
            writes |= step.writes
        self.rows = tuple(key for key in range(min(writes.bit_length(), SGPR)) if writes >> key & 1)
        high = writes >> SGPR
        self.pairs = tuple(sorted({key >> 1 for key in range(high.bit_length()) if high >> key & 1}))
        self.ends = self.steps[-1].ends
        kinds = {step.kind for step in self.steps}
        self.progresses = self.ends == "end" or bool(kinds & {"vmem_store", "atomic"})

    @property
    def last(self) -> Step:
        """The step that ends the block."""
        return self.steps[-1]


def _tracking(step: Step) -> Run:
    """A step without a rule of its own neither reads nor writes registers."""
    assert step.run is not None and not step.writes
    return step.run


@dataclass(eq=False)
class Program:
    """One kernel, ready to run; made by `Program.parse` and cached by text."""

    name: str
    metadata: Metadata
    layout: Layout
    blocks: list[Block]
    instructions: int
    hazards: list[Hazard] | None = None  # found by `waits.require_waits` when the program first runs

    @classmethod
    def parse(cls, isa_text: str, kernel: str | None = None) -> Program:
        """Parse one kernel of an ISA text (its first when no name is given); CompileError names what is not
        understood.
        """
        return _parse(isa_text, kernel)

    @property
    def kernarg(self) -> tuple[KernelArgument, ...]:
        """Arguments in the order of the metadata."""
        return self.metadata.arguments

    @property
    def kernarg_bytes(self) -> int:
        """Size of the kernel-argument segment."""
        return self.metadata.kernarg_bytes

    @property
    def lds_bytes(self) -> int:
        """LDS of one workgroup, without dynamic LDS."""
        return self.metadata.lds_bytes

    @property
    def scratch_bytes(self) -> int:
        """Scratch of one work-item; always 0, other kernels are refused."""
        return self.metadata.scratch_bytes

    @property
    def vgprs(self) -> int:
        """Architectural VGPRs of one wave."""
        return self.metadata.vgprs

    @property
    def agprs(self) -> int:
        """Accumulation VGPRs of one wave."""
        return self.metadata.agprs

    @property
    def sgprs(self) -> int:
        """SGPRs of one wave."""
        return self.metadata.sgprs

    @property
    def rows(self) -> int:
        """Rows of the register file: VGPRs, then AccVGPRs."""
        return self.layout.rows

    @property
    def initial_sgprs(self) -> tuple[str | int | None, ...]:
        """What the first SGPRs hold at the start."""
        return self.metadata.initial_sgprs

    def register_name(self, key: int) -> str:
        """A register key as the ISA text spells it."""
        if key >= SGPR:
            number = key - SGPR
            named = {253: "SCC", 106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi"}
            return named.get(number, f"s{number}")
        return f"v{key}" if key < self.layout.vgprs else f"a{key - self.layout.vgprs}"

    def pack(self, values: Sequence[bytes], grid: tuple[int, int, int], block: tuple[int, int, int]) -> bytes:
        """Kernel-argument segment from the explicit arguments' bytes; hidden block counts and group sizes are filled
        in.
        """
        explicit = [argument for argument in self.kernarg if not argument.is_hidden]
        if len(values) != len(explicit):
            raise UsageError(f"kernel {self.name} takes {len(explicit)} arguments, got {len(values)}")
        segment = bytearray(self.kernarg_bytes)
        for argument, value in zip(explicit, values, strict=True):
            if len(value) != argument.size:
                raise UsageError(f"argument at byte {argument.offset} takes {argument.size} bytes, got {len(value)}")
            segment[argument.offset : argument.offset + argument.size] = value
        for argument in self.kernarg:
            if argument.is_hidden:
                data = _hidden(argument, grid, block)
                segment[argument.offset : argument.offset + argument.size] = data
        return bytes(segment)


def _hidden(argument: KernelArgument, grid: tuple[int, int, int], block: tuple[int, int, int]) -> bytes:
    """Hidden arguments that code object v5 and later define (LLVM AMDGPU usage); pointers to services are null."""
    axis = {"x": 0, "y": 1, "z": 2}.get(argument.kind[-1], 0)
    value = 0
    if argument.kind.startswith("hidden_block_count"):
        value = grid[axis]
    elif argument.kind.startswith("hidden_group_size"):
        value = block[axis]
    elif argument.kind == "hidden_grid_dims":
        value = 1 if grid[1] == grid[2] == 1 else 2 if grid[2] == 1 else 3
    return struct.pack("<Q", value)[: argument.size].ljust(argument.size, b"\0")


@lru_cache(maxsize=256)
def _parse(isa_text: str, kernel: str | None) -> Program:
    name, body, first_line = _body(isa_text, kernel)
    metadata = parse_metadata(isa_text, name)
    layout = Layout(metadata.vgprs, metadata.agprs, metadata.sgprs)
    with _without_collector():
        instructions, labels = _instructions(body, first_line)
        steps = [build(inst, layout) for inst in instructions]
        blocks = _blocks(name, steps, labels)
    return Program(name, metadata, layout, blocks, len(steps))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Thousands of new closures make the cycle collector walk all of torch's objects; parsing makes no garbage
    cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _body(text: str, kernel: str | None) -> tuple[str, str, int]:
    wanted = re.escape(kernel) if kernel else r"[A-Za-z_]\w*"
    match = re.search(rf"^({wanted}):[^\n]*\n", text, re.M)
    if match is None:
        raise CompileError(f"the ISA text has no kernel {kernel or ''}".rstrip(), hint="pass the name after `.globl`")
    end = text.find(".Lfunc_end", match.end())
    body = text[match.end() : end if end >= 0 else len(text)]
    return match.group(1), body, text.count("\n", 0, match.end()) + 1


def _instructions(body: str, first_line: int) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions with their lines, and labels with the instruction they stand before."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for offset, raw in enumerate(body.split("\n")):
        text = raw.split(";")[0].split("//")[0].strip()
        if not text:
            continue
        if match := _LABEL.match(text):
            labels[match.group(1)] = len(instructions)
        elif not text.startswith("."):
            instructions.append(parse_instruction(text, first_line + offset))
    return instructions, labels


def _blocks(name: str, steps: list[Step], labels: dict[str, int]) -> list[Block]:
    """Cut at labels, after what ends a block, and around preemptible memory instructions."""
    if not steps or steps[-1].ends not in ("end", "branch"):
        raise CompileError(f"kernel {name} has no s_endpgm at its end", hint="the kernel body is empty or cut off")
    starts = {0, *labels.values()}
    for number, step in enumerate(steps):
        if step.ends or step.preemptible:
            starts.add(number + 1)
        if step.preemptible:
            starts.add(number)
    order = sorted(start for start in starts if start < len(steps))
    index = {start: place for place, start in enumerate(order)}
    blocks = []
    for place, start in enumerate(order):
        end = order[place + 1] if place + 1 < len(order) else len(steps)
        block = Block(place, steps[start:end])
        block.finish()
        if block.ends == "branch":
            label = block.last.target
            if label not in labels or labels[label] not in index:
                raise block.last.inst.unknown(f"label {label} is not defined")
            block.target = index[labels[label]]
        blocks.append(block)
    for block, following in itertools.pairwise(blocks):
        block.yields = block.last.preemptible or following.steps[0].preemptible
    return blocks
