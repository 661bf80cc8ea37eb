"""What an emulated kernel can do wrong, one type each; every fault names the instruction and its line in the ISA text.

A fault is raised where it is noticed, without knowing the instruction; `located` adds kernel, line and text on the way
out.
"""

from __future__ import annotations

from typing import Any

from dieplace.errors import CompileError, KernelFault


class UnknownInstruction(CompileError):
    """The ISA text has a mnemonic, modifier or operand that the interpreter does not know; nothing is guessed."""

    word = "unknown-instruction"


class IsaFault(KernelFault):
    """A fault of the interpreter; facts: kernel, line, instruction, and where known workgroup, wave, lane."""

    @property
    def is_located(self) -> bool:
        """True once the message names the instruction."""
        return "line" in self.facts

    def located(self, kernel: str, line: int, text: str, **facts: Any) -> IsaFault:
        """The same fault with kernel, 1-based line and instruction text in front of the message."""
        where = ", ".join(
            f"{name} {facts[name]}" for name in ("workgroup", "wave", "lane") if facts.get(name) is not None
        )
        place = f"kernel {kernel}, line {line}: `{text}`" + (f" ({where})" if where else "")
        everything = {"kernel": kernel, "line": line, "instruction": text, **facts, **self.facts}
        return type(self)(f"{place}: {self.message}", hint=self.hint, **everything)


class OutOfBounds(IsaFault):
    """An address lies outside every buffer, or outside the workgroup's LDS; facts: address, size_bytes, buffer."""

    word = "out-of-bounds"


class Misaligned(IsaFault):
    """An address is not a multiple of what the access needs; facts: address, alignment_bytes."""

    word = "misaligned"


class NeverWritten(IsaFault):
    """A store, address, branch or EXEC mask depends on something never written; facts: origin."""

    word = "never-written"


class BarrierDeadlock(IsaFault):
    """Every wave that is left waits at a barrier that cannot complete."""

    word = "barrier-deadlock"


class Livelock(IsaFault):
    """The step limit was reached; facts: waiting, what each group of waves was doing."""

    word = "livelock"


class MissingWait(IsaFault):
    """A register is used before the load into it was waited for; facts: load_line."""

    word = "missing-wait"


class ReservedValue(IsaFault):
    """An operand holds a value for which the instruction has no defined meaning."""

    word = "reserved-value"
