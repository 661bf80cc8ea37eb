"""What first light saw of a node in each state it went through, and what follows from comparing those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dieplace.experiments.first_light_modes import Switched, Visit
from dieplace.experiments.first_light_questions import Answer, NotAsked, answered, timed_word, without
from dieplace.partition.control import Control
from dieplace.partition.facts import CardFacts, NodeFacts
from dieplace.partition.verify import modes_of

SIZES_APART = 0.001  # ranges that differ by more are told as unequal: shares of a recorded MI308X differ by 0.03 %


@dataclass(frozen=True)
class Observation:
    """A node in one state. `combines` is the driver's own table by part: compute mode to memory modes, None where the
    driver has no such table; empty where it was not asked (asking writes a selector)."""

    state: str
    facts: NodeFacts
    combines: Mapping[str, Mapping[str, Sequence[str] | None]] = field(default_factory=dict)
    alone: str | None = None


@dataclass(frozen=True)
class Seen:
    """Everything: observations in order (the first is the start), switches, and visits that were refused with why."""

    origin: str
    observations: tuple[Observation, ...]
    switches: tuple[Switched, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, what: str) -> str:
        """Why a state was not seen."""
        if self.refused:
            return f"{what}: {'; '.join(f'{state}: {why}' for state, why in self.refused.items())}"
        return f"{what} (changing modes needs --allow-mode-changes)"


def observe(control: Control, visit: Visit | None, *, may_ask: bool) -> Observation:
    """The node now; `may_ask` lets the driver's table be asked, which writes a selector and puts it back."""
    facts = control.read(links=True)
    modes = dict.fromkeys(str(mode) for mode in modes_of(facts).values())
    state = str(visit) if visit is not None else " and ".join(modes) or "mode unknown"
    combines: dict[str, dict[str, Sequence[str] | None]] = {}
    for card in facts.cards:
        part = card.part or card.id
        if may_ask and control.privileged() and part not in combines and card.mode is not None and not card.guest:
            words = card.supported_compute or card.offered_compute
            combines[part] = {word: control.memories_of(card.bdf, word) for word in words}
    return Observation(state, facts, combines, visit.alone if visit is not None else None)


def offered_modes(seen: Seen) -> Answer:
    """What each mode file lists, in every state that was seen."""
    name = "offered-modes"
    rows: dict[str, Any] = {}
    lines = []
    for one in seen.observations:
        for card in _firsts(one.facts):
            body = {
                "available_compute": list(card.offered_compute),
                "supported_compute": list(card.supported_compute),
                "available_memory": list(card.offered_memory),
                "combines": _table(one.combines.get(card.part or card.id, {})),
            }
            rows.setdefault(one.state, {})[card.part or card.id] = body
            compute = ", ".join(card.offered_compute) or "none"
            memory = ", ".join(card.offered_memory) or "none"
            lines.append(f"{one.state}, {card.part or card.id}: compute {compute}; memory {memory}")
            told = [
                f"{word} with {', '.join(found) or 'no memory mode' if found is not None else 'no table'}"
                for word, found in one.combines.get(card.part or card.id, {}).items()
            ]
            lines += [f"{one.state}, the driver combines {'; '.join(told)}"] if told else []
    lines = list(dict.fromkeys(lines))
    if not rows:
        raise NotAsked("there is no card with modes here")
    memories = {card.memory for one in seen.observations for card in one.facts.cards}
    said = f"listed in {len(rows)} states under {', '.join(sorted(filter(None, memories)))}"
    if "NPS2" not in memories:
        return answered(name, "listed in part", f"{said}; NPS2 was not seen: {seen.why_not('no switch')}",
                        origin=seen.origin, value={"by_state": rows}, evidence=lines)  # fmt: skip
    return answered(name, "listed", said, origin=seen.origin, value={"by_state": rows}, evidence=lines)


def _table(combines: Mapping[str, Sequence[str] | None]) -> dict[str, Any]:
    return {word: None if found is None else list(found) for word, found in combines.items()}


def _firsts(facts: NodeFacts) -> list[CardFacts]:
    """The first card of each part."""
    return list({card.part or card.id: card for card in reversed(facts.cards)}.values())[::-1]


def range_sizes(seen: Seen) -> Answer:
    """Whether the two ranges of NPS2 have the same size, by the KFD banks of DPX/NPS2."""
    name = "range-sizes"
    found = _in_dpx_nps2(seen)
    if found is None:
        raise NotAsked(seen.why_not("no card was seen in DPX/NPS2"))
    sizes = {card.id: [device.hbm_bytes for device in card.devices] for card in found.facts.cards}
    lines = [
        f"{card}: {' and '.join('unknown' if n is None else f'{n:,} bytes' for n in values)}"
        for card, values in sizes.items()
    ]
    value = {"bytes_by_card": sizes}
    known = [value for values in sizes.values() for value in values]
    if None in known:
        why = "the size of a range is not readable"
        return without("unknown", name, why, origin=seen.origin, value=value, evidence=lines)
    apart = max(max(v) / min(v) - 1 for v in sizes.values() if v and all(v))  # type: ignore[type-var, operator]
    word = "equal" if apart == 0 else "nearly equal" if apart <= SIZES_APART else "unequal"
    said = (
        f"the two ranges of a card differ by {apart * 100:.2f} % at most"
        if apart
        else "both ranges of a card are equal"
    )
    return answered(name, word, said, origin=seen.origin, value={**value, "apart": apart}, evidence=lines)


def sibling_ids(seen: Seen, ids: Mapping[str, Mapping[str, str | None]]) -> Answer:
    """Whether partitions of one card have one `unique_id`; `ids` is state to device to id, pseudonyms."""
    name = "sibling-ids"
    lines, verdicts = [], set[str]()
    for state, devices in ids.items():
        cards: dict[str, list[str | None]] = {}
        for device, unique in devices.items():
            cards.setdefault(device.split("/")[0], []).append(unique)
        for card, values in cards.items():
            if len(values) > 1 and None not in values:
                verdicts.add("equal" if len(set(values)) == 1 else "distinct")
                lines.append(f"{state}, {card}: {len(set(values))} ids on {len(values)} devices")
    if not verdicts:
        unread = any(None in devices.values() and len(devices) > 1 for devices in ids.values())
        if unread:
            return without("unknown", name, "KFD shows no unique_id for some partitions", origin=seen.origin)
        raise NotAsked(seen.why_not("no card was seen with more than one device"))
    word = verdicts.pop() if len(verdicts) == 1 else "differs by card or mode"
    told = {"equal": "siblings share one unique_id", "distinct": "each partition has a unique_id of its own"}
    said = told.get(word, "siblings share one unique_id in some states and not in others")
    return answered(name, word, said, origin=seen.origin, value={"by_state": dict(ids)}, evidence=lines)


def node_order(seen: Seen) -> Answer:
    """What a switch of one card does to the KFD node numbers of all."""
    name = "node-order"
    pair = next(
        ((a, b) for a, b in zip(seen.observations, seen.observations[1:], strict=False) if b.alone is not None), None
    )
    if pair is None:
        alone = all(len(one.facts.cards) < 2 for one in seen.observations)
        raise NotAsked("there is one card" if alone else seen.why_not("no card was switched alone"))
    before, after = (_numbers(one.facts) for one in pair)
    card = str(pair[1].alone)
    others_before = {k: v for k, v in before.items() if not k.startswith(f"{card}/")}
    others = {k: v for k, v in after.items() if not k.startswith(f"{card}/")}
    mine = [v for k, v in after.items() if k.startswith(f"{card}/")]
    shifted = sum(others[k] != v for k, v in others_before.items() if k in others)
    lines = [f"{name_}: node {before.get(name_, '-')} before, {after.get(name_, '-')} after" for name_ in
             dict.fromkeys([*before, *after])]  # fmt: skip
    value = {"before": before, "after": after, "other_devices_shifted": shifted}
    if not mine or not others:
        why = "the switched card or all others have no KFD nodes"
        return without("unknown", name, why, origin=seen.origin, value=value, evidence=lines)
    at_end = min(mine) > max(others.values())
    word = "appended" if at_end else "in place" if shifted == 0 or max(mine) < min(others.values()) else "mixed"
    said = {
        "appended": f"the new devices of {card} came at the end, and {shifted} devices of other cards changed number",
        "in place": f"the new devices of {card} took its place, and {shifted} devices of other cards changed number",
        "mixed": f"the new devices of {card} lie between those of other cards; {shifted} of these changed number",
    }[word]
    return answered(name, word, said, origin=seen.origin, value=value, evidence=lines)


def _numbers(facts: NodeFacts) -> dict[str, int]:
    return {f"{c.id}/p{d.partition}": d.kfd_node for c in facts.cards for d in c.devices}


def reload_times(seen: Seen) -> Answer:
    """How long the driver took to unload, to load, and to be ready, on this many cards."""
    name = "reload-times"
    reloads = [one for one in seen.switches if one.load_s is not None]
    if not reloads:
        raise NotAsked(seen.why_not("the driver was not reloaded"))
    cards = len(seen.observations[0].facts.cards)
    rows = [
        {"to": one.to, "unload_s": one.unload_s, "load_s": one.load_s, "ready_s": one.ready_s, "switch_s": one.seconds}
        for one in reloads
    ]
    lines = [
        f"to {one.to}: unload {_s(one.unload_s)}, load {_s(one.load_s)}, ready {_s(one.ready_s)} later,"
        f" whole switch {one.seconds:.1f} s"
        for one in reloads
    ]
    worst = max((one.unload_s or 0) + (one.load_s or 0) + (one.ready_s or 0) for one in reloads)
    where = f"on {cards} card{'s' if cards != 1 else ''}, in {len(reloads)} reload{'s' if len(reloads) != 1 else ''}"
    said = f"unload, load and ready together took at most {worst:.1f} s {where}"
    if seen.origin == "emulated":
        said += ", by the emulated node's own clock: waits that were written down, not a driver"
    value = {"cards": cards, "reloads": rows}
    return answered(name, timed_word(seen.origin), said, origin=seen.origin, value=value, evidence=lines)


def _s(seconds: float | None) -> str:
    return "not seen" if seconds is None else f"{seconds:.1f} s"


def init_while_unloaded(seen: Seen) -> Answer:
    """What AMD's library said to `amdsmi_init` while the driver was away."""
    name = "amdsmi-init-unloaded"
    told = [one.away for one in seen.switches if one.away is not None]
    if not told:
        raise NotAsked(seen.why_not("the driver was never away"))
    reply = told[0]
    if "not_asked" in reply:
        raise NotAsked(str(reply["not_asked"]))
    value = {key: reply.get(key) for key in ("code", "name", "stage")}
    version = reply.get("versions", {}).get("library", "of unknown version")
    text = f"library {version}: {reply.get('text') or 'no text'}"
    if reply.get("ok"):
        return answered(name, "succeeds", "amdsmi_init succeeds without a driver", origin=seen.origin, value=value,
                        evidence=[text])  # fmt: skip
    if reply.get("name") == "TIMEOUT" and reply.get("stage") == "child":
        return answered(name, "hangs", f"amdsmi_init did not return ({reply.get('text')})", origin=seen.origin,
                        value=value, evidence=[text])  # fmt: skip
    if reply.get("stage") != "init":
        why = f"amdsmi_init was not reached: {reply.get('text')}"
        return without("unknown", name, why, origin=seen.origin, value=value)
    said = f"amdsmi_init fails with {reply.get('name') or 'status'} ({reply.get('code')})"
    return answered(name, "fails", said, origin=seen.origin, value=value, evidence=[text])


def _in_dpx_nps2(seen: Seen) -> Observation | None:
    for one in seen.observations:
        modes = {str(card.mode) for card in one.facts.cards}
        if modes == {"DPX/NPS2"}:
            return one
    return None
