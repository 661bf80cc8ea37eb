"""The partitioning group of the backend seam, in terms of a control: shared by every backend that can partition."""

from __future__ import annotations

import os
from dataclasses import replace

from dieplace.backends.base import Backend, Holders
from dieplace.errors import DieplaceError
from dieplace.machine import Card
from dieplace.modes import Mode
from dieplace.partition.entry import build, carry_out, control_of
from dieplace.partition.journal import Record, standing
from dieplace.partition.plan import targets_text
from dieplace.partition.support import offered_modes


def notes(session: Backend) -> tuple[str, ...]:
    """Sentences about an unfinished switch or a pending memory mode, for every snapshot; costs nothing where no switch
    was ever made."""
    control = control_of(session, None)
    if not control.store.directory.is_dir():
        return ()
    try:
        return standing(Record(control.store), control.read())
    except DieplaceError as error:
        return (error.message,)


def switching(session: Backend) -> str | None:
    """A sentence where a partition switch of this node is running now, else None; never takes the lock itself.

    While the driver switches it holds KFD's lock, and opening /dev/kfd gives EINVAL (kfd_device.c; legacy-rocm-build
    issue 5379); a program that gets in before that keeps the driver from unloading.
    """
    control = control_of(session, None)
    if not control.store.directory.is_dir():
        return None
    try:
        journal = Record(control.store).journal()
    except DieplaceError:
        journal = None
    mine = journal is not None and journal.outcome is None and journal.boot_id == control.read().boot_id
    alive = mine and journal is not None and os.path.exists(f"/proc/{journal.pid}")
    if not alive and not control.store.is_locked():
        return None
    what = f"to {targets_text(journal.targets)} " if mine and journal is not None else ""
    return f"a partition switch {what}is running: until it has ended, opening /dev/kfd gives EINVAL"


def modes(session: Backend, card: Card) -> tuple[Mode, ...]:
    """Every mode the card can be asked for: the driver's word where it gives one without a write."""
    return offered_modes(control_of(session, None).read().card(card.bdf))


def mode(session: Backend, card: Card) -> Mode | None:
    """The card's mode now, or None where it cannot be read."""
    return control_of(session, None).read().card(card.bdf).mode


def set_mode(session: Backend, card: Card, mode: Mode) -> None:
    """Switch one card through the same plan, checks, journal and verification as everybody."""
    control = control_of(session, None)
    facts = control.read()
    carry_out(replace(build(control, facts, {facts.card(card.bdf).id: mode}), session=session), control)


def holders(session: Backend, card: Card | None = None) -> Holders:
    """Who holds the node, or one card of it."""
    control = control_of(session, None)
    found = control.holders()
    if card is None:
        return found
    name = control.read().card(card.bdf).id
    mine = tuple(h for h in found.holders if not h.devices or any(d.split("/")[0] == name for d in h.devices))
    return Holders(mine, found.incomplete)
