"""Who must be gone before a plan's first step: pure decisions over what the holder scan found, and the wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dieplace.backends.base import Holder, Holders
from dieplace.errors import Busy
from dieplace.partition.control import Control
from dieplace.partition.plan import Plan, holder_text

Report = Callable[[str], None]
_POLL_S = 1.0


def blockers(holders: Holders, cards: Sequence[str], *, reload: bool, units: Sequence[str] = ()) -> tuple[Holder, ...]:
    """Holders in the way of a switch of `cards`, those of `units` (which will be stopped) left out.

    A reload needs every card free. A compute set needs its own cards free of KFD users; whether a DRM-only user also
    stops it is not known, but its device would vanish under it, so it blocks too.
    """
    out = []
    for holder in holders.holders:
        if holder.unit is not None and holder.unit in units:
            continue
        everywhere = not holder.devices
        touches = everywhere or any(device.split("/")[0] in cards for device in holder.devices)
        if reload or (touches and holder.kind != "module"):
            out.append(holder)
    return tuple(out)


def require_free(plan: Plan, control: Control, wait_s: float, report: Report, units: Sequence[str] = ()) -> None:
    """Return when nothing is in the way; raise Busy with the list after `wait_s` seconds. Nothing is ever killed."""
    deadline = control.clock.now() + wait_s
    told: tuple[Holder, ...] | None = None
    while True:
        found = control.holders()
        left = blockers(found, plan.blast.cards, reload=plan.reload, units=units)
        if not left and not found.incomplete:
            return
        remaining = deadline - control.clock.now()
        if remaining <= 0:
            raise busy(left, found.incomplete)
        if left != told:
            report(f"waiting for {'; '.join(map(holder_text, left)) or 'a complete view of holders'}")
            told = left
        control.clock.sleep(min(_POLL_S, remaining))


def busy(left: Sequence[Holder], incomplete: Sequence[str]) -> Busy:
    """The refusal, with every holder named and what would help."""
    facts = {"holders": [vars(holder) for holder in left], "incomplete": list(incomplete)}
    if left:
        units = sorted({holder.unit for holder in left if holder.unit})
        named = f"stop them, name {' '.join(f'--stop-service {u}' for u in units)}" if units else "stop them"
        if any(holder.kind == "ghost" for holder in left):
            named += " (restart a process that is attached without an open descriptor: only its exit frees the card)"
        return Busy(
            f"{len(left)} in the way: {'; '.join(map(holder_text, left))}", hint=f"{named}, or --wait SECONDS", **facts
        )
    return Busy(
        f"the view of who uses the cards is incomplete: {'; '.join(incomplete)}",
        hint="run as root on the host itself, outside any container; nothing is switched half blind",
        **facts,
    )
