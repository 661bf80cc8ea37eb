"""The questions that are asked of a node without opening its devices: holders, permissions, AMD's library, spilling.

What they change for the asking (one card's compute mode, one file) is written down before and put back after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dieplace.errors import Busy, DieplaceError, NotAllowed, NotVerified
from dieplace.experiments.first_light_modes import Permission, Visit, plan_visit
from dieplace.experiments.first_light_questions import Answer, NotAsked, answered, gb, without
from dieplace.modes import Mode
from dieplace.partition.blocking import blockers
from dieplace.partition.control import Answer as Told
from dieplace.partition.control import Control
from dieplace.partition.journal import Record
from dieplace.partition.plan import holder_text
from dieplace.sysfs import Sysfs, errno_name

if TYPE_CHECKING:
    from dieplace.experiments.first_light_host import Host
    from dieplace.partition.facts import CardFacts, NodeFacts

PCI = "/sys/bus/pci/devices"
KFD_PROCESSES = "/sys/class/kfd/kfd/proc"
DRM_ROUNDS = 3  # sets with a client; each has one without it before and after


@dataclass(frozen=True)
class NodeScene:
    """The host and its control, what is allowed, and how to note a file to be put back (None: it has been)."""

    host: Host
    control: Control
    permission: Permission
    start: NodeFacts
    remember: Callable[[str, str | None], None]
    ask_devices: Callable[[str], Answer]

    @property
    def origin(self) -> str:
        """`measured` or `emulated`."""
        return self.host.origin

    @property
    def sysfs(self) -> Sysfs:
        """The node's files."""
        if self.host.sysfs is None:
            raise NotAsked("this host has no driver files to look at")
        return self.host.sysfs

    def need_leave(self) -> None:
        """NotAsked unless modes may be changed."""
        if not self.permission.modes:
            raise NotAsked("it changes a card for a moment, and changing modes was not allowed (--allow-mode-changes)")
        if not self.control.privileged():
            raise NotAllowed("changing a card needs root", hint="run the same command as root")


def drm_client(scene: NodeScene) -> Answer:
    """Whether a process with a render node open, and nothing else, keeps a compute mode from being set."""
    name = "drm-client"
    scene.need_leave()
    facts = scene.control.read()
    # The last card: its nodes end the list already, so that the asking moves nobody's.
    card = next((card for card in reversed(facts.cards) if card.mode is not None and card.devices), None)
    if card is None or card.mode is None:
        raise NotAsked("no card has a mode and a device")
    other = next((word for word in reversed(card.offered_compute) if word != card.compute), None)
    if other is None:
        raise NotAsked(f"{card.id} offers no other compute mode in {card.memory}")
    found = scene.control.holders()
    busy = blockers(found, (card.id,), reload=False)
    if busy:
        raise Busy(f"{card.id} is held already: {'; '.join(map(holder_text, busy))}", hint="stop them", holders=[])
    # Written down like any switch, with the state to restore: a kill in between leaves a way back.
    visit = Visit({card.id: Mode(other, str(card.memory))}, card.id)
    plan = plan_visit(scene.control, visit, scene.start, replace(scene.permission, unvalidated=True))
    record = Record(scene.control.store)
    tries: list[DrmTry] = []
    back: str | None = None
    with scene.control.store.lock(scene.permission.wait_s, scene.control.clock):
        journal = record.begin(plan)
        # A refusal may be the driver's own, for a moment: the same set is made without the client, before and after.
        for number in range(2 * DRM_ROUNDS + 1):
            held = scene.host.drm_client(facts, card.id) if number % 2 else nullcontext()
            with held as who:
                told = scene.control.set_compute(card.bdf, other)
                tries.append(DrmTry(who, told, _compute(scene.control, card) == other))
            back = _put_back(scene.control, card)
            if back is not None:
                break
        record.update(journal, outcome="done", detail="first light asked whether a DRM client blocks it")
    if back is not None:
        raise NotVerified(f"{card.id} did not come back to {card.compute}: {back}", outcome="not-verified")
    return drm_answer(name, scene.origin, card.id, other, tries)


@dataclass(frozen=True)
class DrmTry:
    """One attempt to set a compute mode: who had the render node open (None: nobody), and what came of it."""

    client: str | None
    told: Told
    switched: bool

    @property
    def outcome(self) -> str:
        """`taken`, `busy` or what was told."""
        if self.told.ok and self.switched:
            return "taken"
        return "busy" if self.told.meaning == "busy" else f"ended as {self.told}"


def drm_answer(name: str, origin: str, card: str, asked: str, tries: Sequence[DrmTry]) -> Answer:
    """`blocks` only where every set with the client was busy and every one without it was taken."""
    having = [one.outcome for one in tries if one.client is not None]
    alone = [one.outcome for one in tries if one.client is None]
    who = next((one.client for one in tries if one.client is not None), None)
    value = {"asked": asked, "client": who, "with_client": having, "without_client": alone}
    lines = [f"{'with the client' if one.client else 'without it'}: {one.outcome}" for one in tries]
    if having and alone and set(alone) == {"taken"}:
        if set(having) == {"taken"}:
            said = f"{card} took {asked} {len(having)} times with {who}, as without it, and was put back"
            return answered(name, "does not block", said, origin=origin, value=value, evidence=lines)
        if set(having) == {"busy"}:
            said = (
                f"{card} refused {asked} as busy {len(having)} times with {who}, whom no KFD list shows, and took it"
                f" {len(alone)} times without"
            )
            return answered(name, "blocks", said, origin=origin, value=value, evidence=lines)
    why = f"setting {asked} with a DRM client: {_tally(having)}; without it: {_tally(alone)}; so nothing is told by it"
    return without("unknown", name, why, origin=origin, value=value, evidence=lines)


def _tally(outcomes: Sequence[str]) -> str:
    return ", ".join(f"{outcomes.count(one)} of {len(outcomes)} {one}" for one in dict.fromkeys(outcomes)) or "no try"


def _compute(control: Control, card: CardFacts) -> str | None:
    return next((found.compute for found in control.read().cards if found.bdf == card.bdf), None)


def _put_back(control: Control, card: CardFacts) -> str | None:
    """Set the card's compute mode as it was; None when it reads so, else what it reads or was told."""
    assert card.compute is not None
    told: Told | None = None
    for _ in range(3):
        if _compute(control, card) == card.compute:
            return None
        told = control.set_compute(card.bdf, card.compute)
    now = _compute(control, card)
    return None if now == card.compute else f"it reads {now or 'nothing'} ({told})"


def kfd_counters(scene: NodeScene) -> Answer:
    """Whether another user may read the bytes that a process holds on each die."""
    name = "kfd-counters"
    with scene.host.kfd_user() as pid:
        folder = f"{KFD_PROCESSES}/{pid}"
        sysfs = scene.sysfs
        try:
            names = [one for one in sysfs.names(folder) if one.startswith("vram_")]
        except OSError as error:
            why = f"KFD does not list the process that was started for it ({errno_name(error.errno)})"
            return without("unknown", name, why, origin=scene.origin)
        if not names:
            why = "the process that was started for it has no vram_ file"
            return without("unknown", name, why, origin=scene.origin)
        try:
            text, who = scene.host.read_as_stranger(f"{folder}/{names[0]}")
        except PermissionError as error:
            said = f"another user gets {errno_name(error.errno)} on {len(names)} files"
            value = {"files": len(names), "error": errno_name(error.errno)}
            return answered(name, "not readable", said, origin=scene.origin, value=value)
    value = {"files": len(names), "bytes": int(text) if text.strip().isdigit() else None, "reader": who}
    if "belongs" in who:
        why = f"read as {who}: whether others may is seen only by root, who can become nobody"
        return without("unknown", name, why, origin=scene.origin, value=value)
    said = f"{who} reads the bytes of a process on each of {len(names)} devices"
    return answered(name, "readable", said, origin=scene.origin, value=value)


def library_descriptors(scene: NodeScene) -> Answer:
    """Which device files an initialised AMD library keeps open, and whether shutting it down closes them."""
    name = "amdsmi-descriptors"
    reply = scene.host.library("descriptors")
    version = reply.get("versions", {}).get("library", "of unknown version")
    if not reply.get("ok"):
        why = f"library {version} did not answer: {reply.get('text')}"
        return without("unknown", name, why, origin=scene.origin, value={"library": version})
    opened = {key: list(reply["open"].get(key, [])) for key in ("before", "initialised", "asked", "shut_down")}
    counts = {key: len(files) for key, files in opened.items()}
    value = {"library": version, "open": counts}
    lines = [f"{key}: {', '.join(files) or 'none'}" for key, files in opened.items()]
    held = counts["asked"] - counts["before"]
    left = counts["shut_down"] - counts["before"]
    if left > 0:
        said = f"library {version} keeps {left} device files open even after shutdown"
        return answered(name, "holds, even after shutdown", said, origin=scene.origin, value=value, evidence=lines)
    if held > 0:
        said = f"library {version} holds {held} device files until shutdown, and an unload would fail meanwhile"
        return answered(name, "holds until shutdown", said, origin=scene.origin, value=value, evidence=lines)
    said = f"library {version} keeps no device file open"
    return answered(name, "holds none", said, origin=scene.origin, value=value, evidence=lines)


def alloc_mode(scene: NodeScene) -> Answer:
    """Whether lifting the cap on a partition's memory lets one die take from the other's range in NPS2."""
    name = "mem-alloc-mode"
    facts = scene.control.read()
    cards = [card for card in facts.cards if card.memory == "NPS2" and card.devices]
    if not cards:
        raise NotAsked("no card is in NPS2 here")
    card = cards[0]
    path = f"{PCI}/{card.bdf}/compute_partition_mem_alloc_mode"
    sysfs = scene.sysfs
    was = sysfs.read_or_none(path)
    if was is None:
        said = "this driver has no compute_partition_mem_alloc_mode"
        return answered(name, "no such file", said, origin=scene.origin, value={"card": card.id})
    scene.need_leave()
    before = _sizes(facts, card)
    scene.remember(path, was)
    try:
        sysfs.write(path, "ALL")
        now = sysfs.read(path)
        during = _sizes(scene.control.read(), card)
        filled, why = _fill(scene)
    except OSError as error:
        why = f"the driver refuses ALL: {errno_name(error.errno)}"
        return without("refused", name, why, origin=scene.origin, value={"was": was})
    finally:
        sysfs.write(path, was)
        if sysfs.read(path) == was:
            scene.remember(path, None)
    return _alloc_answer(name, scene.origin, card, was, now, before, during, filled, why)


def _fill(scene: NodeScene) -> tuple[Mapping[str, Any], str | None]:
    try:
        found = scene.ask_devices("fill")
    except DieplaceError as error:
        return {}, error.message
    return (found.value, None) if found.status == "answered" else ({}, found.said)


def _alloc_answer(
    name: str, origin: str, card: CardFacts, was: str, now: str, before: list[int | None], during: list[int | None],
    filled: Mapping[str, Any], why: str | None,
) -> Answer:  # fmt: skip
    own = (card.hbm_bytes or 0) // 2 or None
    value: dict[str, Any] = {
        "card": card.id, "was": was, "read_back": now, "limit_bytes_before": before, "limit_bytes_with_all": during,
        "given_bytes": filled.get("got_bytes"), "range_bytes": own,
    }  # fmt: skip
    if filled.get("got_bytes") is None:
        value["given_bytes_why"] = why or "no device was asked"
    if now != "ALL":
        said = f"the file took ALL and reads {now}"
        return without("unknown", name, said, origin=origin, value=value)
    limits = [n for n in during if n is not None]
    if own is None or not limits:
        return without("unknown", name, "the sizes are not readable", origin=origin, value=value)
    given = filled.get("got_bytes")
    seen = f"a device may take {gb(max(limits))} of its range of {gb(own)}"
    seen += f"; it was given {gb(given)}" if given else ""
    if max(limits) > 1.01 * own or (given is not None and given > 1.01 * own):
        said = f"with ALL one die takes from the other's range: {seen}"
        return answered(name, "can spill", said, origin=origin, value=value)
    if given is None:
        said = f"by its sizes a die stays in its range with ALL ({seen}); nothing was taken, because {why}"
        return answered(name, "cannot spill, by its sizes", said, origin=origin, value=value)
    return answered(name, "cannot spill", f"with ALL a die stays in its own range: {seen}", origin=origin, value=value)


def _sizes(facts: NodeFacts, card: CardFacts) -> list[int | None]:
    found = next(one for one in facts.cards if one.bdf == card.bdf)
    return [device.hbm_bytes for device in found.devices]
