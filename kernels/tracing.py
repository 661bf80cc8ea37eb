"""Runs one op's FlyDSL kernel on the emulated card with every operand placed, and gives what it moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dieplace.errors import Unsupported, UsageError
from dieplace.kernels.cases import Case, cases
from dieplace.kernels.registry import bytes_by_operand, check_call, implementation, offered, op
from dieplace.machine import Domain

if TYPE_CHECKING:
    from dieplace.emulator.execution import KernelRecord
    from dieplace.emulator.hbm import EmulatedHBM
    from dieplace.emulator.isa.hierarchy_watch import OldLoads
    from dieplace.emulator.isa.traffic import BufferTraffic, Bytes

DOMAIN_BYTES = 144_000_000_000  # one die of an MI355X (AMD CDNA 4 white paper)


@dataclass(frozen=True)
class Traced:
    """What one call moved: per kernel, and per buffer over all kernels of the op."""

    label: str
    kernels: tuple[KernelRecord, ...]
    contract_bytes: dict[str, int]  # operand -> distinct bytes that the op's contract says are touched
    code_hashes: tuple[str, ...]

    @property
    def buffers(self) -> tuple[BufferTraffic, ...]:
        """Every kernel's buffers, one after another."""
        return tuple(b for k in self.kernels if k.traffic is not None for b in k.traffic.buffers)

    @property
    def old_loads(self) -> tuple[OldLoads, ...]:
        """Instructions that loaded old bytes, and why: polls that were early, or a race."""
        return tuple(found for kernel in self.kernels for found in kernel.old_loads)

    @property
    def instructions(self) -> int:
        """Wave-instructions of all kernels."""
        return sum(k.instructions for k in self.kernels)

    @property
    def by_kind(self) -> dict[str, int]:
        """Wave-instructions by kind."""
        total: Counter[str] = Counter()
        for kernel in self.kernels:
            total.update(kernel.by_kind)
        return dict(total)

    def by_role(self) -> dict[str, tuple[Bytes, Bytes]]:
        """Role to bytes read and written, over all kernels."""
        from dieplace.emulator.isa.traffic import by_role

        return by_role(self.buffers)


def domains_of(device: str) -> tuple[Domain, ...]:
    """The emulated card's memory: two domains of one die each, or for a whole card one over both dies."""
    card, _, part = device.partition("/")
    if part:
        return tuple(Domain(f"{card}/mem{die}", card, (die,), DOMAIN_BYTES) for die in (0, 1))
    return (Domain(f"{card}/mem0", card, (0, 1), 2 * DOMAIN_BYTES),)


def trace_op(
    name: str, *, case: int = 0, device: str = "gpu0/p0", peer: frozenset[str] = frozenset(), seed: int = 0
) -> Traced:
    """Run check case number `case` of op `name`; roles in `peer` lie on the other die.

    Unsupported when no FlyDSL kernel runs this case, UsageError for an unknown name, case or device.
    """
    from dieplace.emulator.execution import Session
    from dieplace.emulator.hbm import EmulatedHBM

    kernel = implementation(name, "flydsl")
    if kernel is None:
        raise Unsupported(f"no FlyDSL kernel implements {name!r}", hint=f"one of {', '.join(offered('flydsl'))}")
    chosen = _case(name, case)
    domains = domains_of(device)
    if peer and len(domains) == 1:
        raise UsageError(f"{device} is a whole card: its memory lies on both dies", hint="--device gpu0/p0")
    hbm = EmulatedHBM(domains)
    operands = place(name, chosen, hbm, domains, device, peer)
    call = check_call(name, operands, chosen.attrs)
    why = kernel.supports(call.operands, call.attrs) if hasattr(kernel, "supports") else None
    if why:
        raise Unsupported(f"the FlyDSL kernel of {name!r} does not run case {chosen.label}: {why}")
    roles = {spec.name: spec.role for spec in op(name).operands}
    with Session(device=device, memory=hbm, seed=seed, role_of=roles.get) as session:
        kernel(call.operands, call.attrs)
    kernels = tuple(k for record in session.records for k in record.kernels)
    return Traced(chosen.label, kernels, bytes_by_operand(call), tuple(r.code_hash or "" for r in session.records))


def place(
    name: str, case: Case, hbm: EmulatedHBM, domains: tuple[Domain, ...], device: str, peer: frozenset[str]
) -> dict[str, Tensor | None]:
    """Copies of the case's operands in emulated HBM, each on the device's die or, by role, on the other."""
    own = int(device.rpartition("p")[2]) if len(domains) > 1 else 0
    placed: dict[str, Tensor | None] = {}
    for spec in op(name).operands:
        tensor = case.operands.get(spec.name)
        if tensor is None:
            placed[spec.name] = None
            continue
        domain = domains[1 - own if spec.role in peer else own]
        copy = hbm.empty(tuple(tensor.shape), tensor.dtype, domain.id, role=spec.role, name=spec.name)
        placed[spec.name] = copy.copy_(tensor)
    return placed


def _case(name: str, number: int) -> Case:
    found: list[Any] = cases(op(name).name)
    if not 0 <= number < len(found):
        raise UsageError(f"{name} has no case {number}", hint=f"0 to {len(found) - 1}")
    return found[number]
