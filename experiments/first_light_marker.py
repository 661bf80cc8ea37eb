"""The marker that first light leaves beside the record of switches: what the node was in, under which boot.

Whether a memory mode survives a reboot is documented nowhere and cannot be asked within one boot: the next first light
reads the marker of the last one. It also tells of a first light that was killed before it had led the node back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dieplace.errors import DieplaceError
from dieplace.experiments.first_light_questions import Answer, NotAsked, answered, without
from dieplace.partition.control import Control
from dieplace.partition.facts import NodeFacts
from dieplace.partition.journal import Journal
from dieplace.sysfs import Sysfs, errno_name

SCHEMA = "dieplace/first-light-marker/1"
NAME = "first-light.json"
_PUT_BACK = re.compile(r"/sys/bus/pci/devices/[0-9a-f:.]+/compute_partition_mem_alloc_mode")
QUESTION = "nps2-after-reboot"
HOW_TO = (
    "put the node into DPX/NPS2 (dieplace partition set DPX/NPS2), run first light, reboot or cut the power, and run"
    " first light again before any other switch"
)


@dataclass(frozen=True)
class Marker:
    """`modes` and `memory` by PCI address; `put_back` are files that were changed, with what was in them."""

    boot_id: str | None
    written: str
    pid: int
    running: bool
    modes: Mapping[str, str]
    memory: Mapping[str, str]
    put_back: Mapping[str, str]


def marker_of(facts: NodeFacts, *, running: bool, put_back: Mapping[str, str] | None = None) -> Marker:
    """The marker for a node as it is."""
    modes = {card.bdf: str(card.mode) for card in facts.cards if card.mode is not None}
    memory = {card.bdf: card.memory for card in facts.cards if card.memory is not None}
    return Marker(facts.boot_id, now(), os.getpid(), running, modes, memory, dict(put_back or {}))


def write(control: Control, marker: Marker) -> str | None:
    """Leave it; the reason where it cannot be left (not root, a full disk)."""
    if not control.privileged():
        return "only root keeps the record beside which it lies"
    try:
        control.store.write(NAME, {"schema": SCHEMA, **vars(marker)})
    except DieplaceError as error:
        return error.message
    return None


def with_put_back(marker: Marker, path: str, text: str | None) -> Marker:
    """The marker with one more file to put back, or, with None, one less."""
    rest = {key: value for key, value in marker.put_back.items() if key != path}
    return replace(marker, put_back=rest if text is None else {**rest, path: text})


def read(control: Control) -> Marker | None:
    """The marker of the last first light; None where there is none, or none that can be read."""
    try:
        data = control.store.read(NAME)
    except DieplaceError:
        return None
    if data is None or data.get("schema") != SCHEMA:
        return None
    try:
        maps = {key: {str(k): str(v) for k, v in data[key].items()} for key in ("modes", "memory", "put_back")}
        return Marker(data["boot_id"], str(data["written"]), int(data["pid"]), bool(data["running"]), **maps)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def left_behind(marker: Marker | None, facts: NodeFacts) -> str | None:
    """A sentence where an earlier first light of this boot was killed and the node is not as it had found it."""
    if marker is None or not marker.running or marker.boot_id != facts.boot_id or alive(marker.pid):
        return None
    found = {card.bdf: str(card.mode) for card in facts.cards}
    if found == dict(marker.modes):
        return None
    was = ", ".join(dict.fromkeys(marker.modes.values()))
    return f"a first light that began {marker.written} in {was} was killed before it had led the node back"


def put_files_back(marker: Marker | None, sysfs: Sysfs | None) -> tuple[str, ...]:
    """Files that a first light changed and was killed before it had put them back: put back now, and told."""
    if marker is None or sysfs is None or alive(marker.pid):
        return ()
    told = []
    for path, text in marker.put_back.items():
        now_in = sysfs.read_or_none(path)
        if now_in is None or now_in == text or not _PUT_BACK.fullmatch(path):
            continue
        try:
            sysfs.write(path, text)
            told.append(f"{path} was left at {now_in} by a first light that was killed; it is {text} again")
        except OSError as error:
            told.append(f"{path} was left at {now_in} and cannot be put back to {text}: {errno_name(error.errno)}")
    return tuple(told)


def alive(pid: int) -> bool:
    """Whether a process of this number runs."""
    return os.path.exists(f"/proc/{pid}")


def after_reboot(marker: Marker | None, facts: NodeFacts, journal: Journal | None, *, origin: str) -> Answer:
    """Whether two memory ranges survived the reboot between the last first light and this one."""
    if marker is None:
        raise NotAsked(f"no first light ran here before, and this one cannot reboot the node: {HOW_TO}")
    if marker.boot_id == facts.boot_id:
        raise NotAsked(f"the node was not rebooted since the first light of {marker.written}: {HOW_TO}")
    before = {bdf: word for bdf, word in marker.memory.items() if word != "NPS1"}
    if not before:
        raise NotAsked(f"the node was in NPS1 before its reboot, which is what a reboot may lead to anyway: {HOW_TO}")
    now_in = {card.bdf: card.memory for card in facts.cards if card.bdf in before}
    seen = [f"{bdf}: {word} before, {now_in.get(bdf) or 'not readable'} now" for bdf, word in before.items()]
    value = {"before": dict(before), "now": now_in, "marker_written": marker.written}
    if journal is not None and journal.started > marker.written:
        why = f"a switch was made after the last first light ({journal.started}), so the mode says nothing about a boot"
        return without("unknown", QUESTION, why, origin=origin, value=value, evidence=seen)
    same = [bdf for bdf, word in before.items() if now_in.get(bdf) == word]
    if len(same) == len(before):
        said = "the memory mode survived the reboot on every card (whether the power was cut is not seen)"
        return answered(QUESTION, "survives", said, origin=origin, value=value, evidence=seen)
    if not same and set(now_in.values()) == {"NPS1"}:
        said = "every card came back in NPS1: the memory mode does not survive a reboot"
        return answered(QUESTION, "lost", said, origin=origin, value=value, evidence=seen)
    why = f"{len(same)} of {len(before)} cards kept their memory mode"
    return without("unknown", QUESTION, why, origin=origin, value=value, evidence=seen)


def now() -> str:
    """UTC, as journals write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
