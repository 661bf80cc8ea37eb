"""What first light looks at before it changes anything: the node, the states to go through, and what forbids them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dieplace.errors import DieplaceError, Unsupported
from dieplace.experiments import first_light_marker as markers
from dieplace.experiments import first_light_modes as modes
from dieplace.experiments.first_light_modes import Permission, Visit
from dieplace.partition.journal import Record

if TYPE_CHECKING:
    from dieplace.experiments.first_light_host import Host
    from dieplace.experiments.first_light_marker import Marker
    from dieplace.machine import Machine
    from dieplace.partition.facts import NodeFacts
    from dieplace.partition.journal import Journal


@dataclass(frozen=True)
class Preflight:
    """What stands before the first change: the node, the states to visit, what is in the way, what must be said."""

    machine: Machine
    facts: NodeFacts | None
    visits: tuple[Visit, ...]
    marker: Marker | None
    earlier: Journal | None
    why_no_switch: str | None
    lines: tuple[str, ...]

    @property
    def switches(self) -> bool:
        """Whether a mode will be changed."""
        return bool(self.visits) and self.why_no_switch is None


def preflight(host: Host, permission: Permission) -> Preflight:
    """Look, decide which modes to go through, and find what forbids it; changes nothing.

    Unsupported where an earlier switch did not end, or an earlier first light was killed: that comes first.
    """
    machine = host.machine()
    control = host.control
    if control is None:
        return Preflight(machine, None, (), None, None, host.why_no_modes, ())
    facts = control.read()
    marker = markers.read(control)
    left = markers.left_behind(marker, facts)
    unfinished = [*modes.unfinished(control, facts), *([left] if left else [])]
    if unfinished and permission.modes:
        raise Unsupported(
            f"first light changes no mode while an earlier change stands open: {'; '.join(unfinished)}",
            hint="run 'dieplace partition restore' first, or leave --allow-mode-changes out",
        )
    why = None
    visits = modes.visits(facts, unvalidated=permission.unvalidated)
    if not permission.modes:
        why = "changing modes was not allowed (--allow-mode-changes)"
    elif not control.privileged():
        why = "changing modes needs root"
    elif not visits:
        why = "no other mode is offered and listed by AMD for every card here"
    lines: list[str] = list(unfinished)
    if visits and why is None:
        lines += _plan_lines(host, facts, visits, permission)
    earlier = Record(control.store).journal() if not unfinished else None
    return Preflight(machine, facts, visits, marker, earlier, why, tuple(lines))


def _plan_lines(host: Host, facts: NodeFacts, visits: Sequence[Visit], permission: Permission) -> list[str]:
    from dieplace.partition.plan import lines

    assert host.control is not None
    way = " -> ".join([" and ".join(dict.fromkeys(str(c.mode) for c in facts.cards)), *map(str, visits)])
    try:
        first = lines(modes.plan_visit(host.control, visits[0], facts, permission))
    except DieplaceError as error:  # it will be told as refused, and all that needs no switch is asked
        first = [f"It cannot be planned: {error}"]
    return [
        f"First light goes through {way}, and back to the first.",
        "In each it records the node and asks its questions; a card is set to another compute mode for a moment, and",
        "compute_partition_mem_alloc_mode of one card is set to ALL and back.",
        "Its first switch:",
        *first,
    ]
