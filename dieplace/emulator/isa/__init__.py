"""gfx950 interpreter: runs the ISA text of a kernel, all resident waves at once, on host memory."""

from dieplace.emulator.isa.faults import (
    BarrierDeadlock,
    IsaFault,
    Livelock,
    Misaligned,
    MissingWait,
    NeverWritten,
    OutOfBounds,
    ReservedValue,
    UnknownInstruction,
)
from dieplace.emulator.isa.memory import Buffer, MemoryPort, PlainMemory, Poll
from dieplace.emulator.isa.program import Program
from dieplace.emulator.isa.request import Request
from dieplace.emulator.isa.schedule import Machine, RunStats, run
from dieplace.emulator.isa.state import Launch, LogicalDevice

__all__ = [
    "BarrierDeadlock",
    "Buffer",
    "IsaFault",
    "Launch",
    "Livelock",
    "LogicalDevice",
    "Machine",
    "MemoryPort",
    "Misaligned",
    "MissingWait",
    "NeverWritten",
    "OutOfBounds",
    "PlainMemory",
    "Poll",
    "Program",
    "Request",
    "ReservedValue",
    "RunStats",
    "UnknownInstruction",
    "run",
]
