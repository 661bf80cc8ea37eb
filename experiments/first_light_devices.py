"""The questions that need devices: what they ask for, and which answer follows from what was seen.

They run in a process of their own. `hands` does the work (first_light_hands.py on GPUs, first_light_emulated.py on the
emulated card); the functions here judge, and are tested on every branch with hands that were told what to see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Protocol

from dieplace.errors import DieplaceError, PlacementError, Unsupported
from dieplace.experiments.first_light_hands import TorchHands
from dieplace.experiments.first_light_questions import Answer, NotAsked, answered, gb, without
from dieplace.experiments.first_light_sights import Filled, Remapped, Rounds, Uncached
from dieplace.policy import peer_domain

if TYPE_CHECKING:
    from dieplace.machine import Device, Domain, Machine

POLL_ROUNDS, VISIBILITY_ROUNDS = 20_000, 4_000
EMULATED_ROUNDS, EMULATED_READERS = 6, 4
STORE_LAUNCHES = 7  # of each side, in turn: one launch shows no spread
READERS = 256  # on the devices meant here this puts some on every XCD
CLOSE_NS = 100.0  # what public notes saw in SPX/NPS2: about 105 ns each way (sangeeta0201/fleet-chiplet-megakernel)
STALE = "stale-read"  # the emulator's word for a store that a poll can never see
AS_SLOW = 1.5  # uncached reads that take so many times as long as plain ones were not answered by a cache


class Hands(Protocol):
    """What a device question may do."""

    def offers_access(self, one: Device, other: Device) -> bool | None: ...
    def wrong_bytes(self, executing: Device, domain: Domain, owner: Device, memory_class: str) -> int: ...
    def uncached(self, device: Device) -> Uncached: ...
    def rounds(
        self, writer: Device, reader: Device, *, readers: int, rounds: int, memory_class: str, scope: str
    ) -> Rounds: ...
    def remap(self, device: Device) -> Remapped: ...
    def launch_ns(self, device: Device) -> tuple[float, float]: ...
    def fill(self, device: Device) -> Filled: ...


@dataclass(frozen=True)
class DeviceScene:
    """The device that executes, its one peer where there is one, and how they are reached."""

    machine: Machine
    origin: str
    device: Device
    peer: Device | None
    why_no_peer: str
    hands: Hands

    def pair(self) -> tuple[Device, Device]:
        """Device and peer; NotAsked without one."""
        if self.peer is None:
            raise NotAsked(self.why_no_peer)
        return self.device, self.peer

    @property
    def emulated(self) -> bool:
        """Whether nothing here is hardware."""
        return self.origin == "emulated"


def scene_of(machine: Machine, hands: Hands | None = None) -> DeviceScene:
    """The first device that this process sees, and its peer; Unsupported where none is visible."""
    seen = sorted((d for d in machine.devices if d.runtime_index is not None), key=lambda d: d.runtime_index or 0)
    if not seen:
        raise Unsupported("no device is visible to this process", hint="see: dieplace env")
    device, peer, why = seen[0], None, ""
    try:
        far = peer_domain(machine, device).id
        peer = next((d for d in seen if d.domain == far), None)
        why = "" if peer else f"no visible device has {far} as its own memory"
    except (PlacementError, DieplaceError) as error:
        why = error.message
    return DeviceScene(machine, origin_of(machine), device, peer, why, hands or hands_of(machine))


def hands_of(machine: Machine) -> Hands:
    """Hands for a machine's backend."""
    if machine.source == "emulated":
        from dieplace.experiments.first_light_emulated import EmulatedHands

        return EmulatedHands(machine)
    return TorchHands(machine)


def origin_of(machine: Machine) -> str:
    """`emulated` or `measured`."""
    return "emulated" if machine.source == "emulated" else "measured"


def peer_access(scene: DeviceScene) -> Answer:
    """Whether the runtime says that the peer can be reached, and whether kernels then do."""
    name = "peer-access"
    one, other = scene.pair()
    says = [scene.hands.offers_access(one, other), scene.hands.offers_access(other, one)]
    value: dict[str, Any] = {"runtime_says": says[0], "runtime_says_backwards": says[1], "wrong_bytes": None}
    if says[0] is None:
        value |= {key: None for key in ("runtime_says", "runtime_says_backwards")}
        value |= {f"{key}_why": "there is no runtime to ask" for key in ("runtime_says", "runtime_says_backwards")}
    domain = scene.machine.domain(str(other.domain))
    if says[0] is False:
        said = f"the runtime offers no access from {one.id} to memory of {other.id}, so no kernel was tried"
        value["wrong_bytes_why"] = "no kernel was tried"
        return answered(name, "no", said, origin=scene.origin, value=value)
    try:
        wrong = scene.hands.wrong_bytes(one, domain, other, "coarse")
    except DieplaceError as error:
        value["wrong_bytes_why"] = error.message
        said = f"the runtime says yes, but memory of {domain.id} cannot be used by {one.id}: {error.message}"
        return answered(name, "runtime and kernels disagree", said, origin=scene.origin, value=value)
    value["wrong_bytes"] = wrong
    if wrong:
        said = f"the runtime says yes, but {wrong} bytes written from {one.id} to {domain.id} came out wrong"
        return answered(name, "runtime and kernels disagree", said, origin=scene.origin, value=value)
    asked = "; the runtime says so too" if says[0] else ""
    said = f"kernels on {one.id} write and read memory of {domain.id} rightly{asked}"
    return answered(name, "yes", said, origin=scene.origin, value=value)


def uncached_memory(scene: DeviceScene) -> Answer:
    """What an uncached request gives: memory of the device or of the host, from which pool, cached or not."""
    name = "uncached-memory"
    found = scene.hands.uncached(scene.device)
    ratio = found.latency_over_plain
    value = {"kind": found.kind, "grain": found.grain, "latency_over_plain": ratio}
    if ratio is None:
        value["latency_over_plain_why"] = found.latency_why or "no latency was taken"
    if found.kind == "host" or found.is_device is False:
        return answered(name, "host memory", "an uncached request comes back in host memory", origin=scene.origin,
                        value=value)  # fmt: skip
    if found.is_device is None and found.kind != "device":
        why = f"neither the runtime ({found.kind}) nor the layer below it says whose the memory is"
        return without("unknown", name, why, origin=scene.origin, value=value)
    cached = "" if ratio is None else f"; a warm read takes {ratio:.2f} times as long as one of plain memory"
    cached += "" if ratio is None else " (no cache answers it)" if ratio >= AS_SLOW else " (a cache answers it)"
    if found.grain == "extended":
        said = f"device memory of the extended-scope pool{cached}"
        return answered(name, "extended device memory", said, origin=scene.origin, value=value)
    said = f"device memory, of the pool that is {found.grain or 'not told'}-grained{cached}"
    return answered(name, "other device memory", said, origin=scene.origin, value=value)


def poll_reliability(scene: DeviceScene) -> Answer:
    """Whether every reader of one device sees every round of a flag in that device's own, cached memory."""
    name = "poll-reliability"
    readers, rounds = (EMULATED_READERS, EMULATED_ROUNDS) if scene.emulated else (READERS, POLL_ROUNDS)
    device = scene.device
    try:
        found = scene.hands.rounds(device, device, readers=readers, rounds=rounds, memory_class="coarse", scope="agent")
    except DieplaceError as error:
        if error.word != STALE:
            raise
        said = f"a poll read a stale flag: {error.message}"
        return answered(name, "unreliable", said, origin=scene.origin, value={"rounds": rounds, "readers": readers})
    lost = sum(found.asked - n for n in found.seen)
    value = {
        "rounds": found.asked, "readers": len(found.seen), "rounds_missed": lost, "places": list(found.places),
    }  # fmt: skip
    if not found.seen:
        return without("unknown", name, "no reader ran", origin=scene.origin, value=value)
    where = f"{len(found.seen)} readers on {len(found.places)} XCDs or SMs of {device.id}"
    if lost:
        said = f"{where} missed {lost} of {found.asked * len(found.seen)} rounds before their polls ran out"
        return answered(name, "unreliable", said, origin=scene.origin, value=value)
    said = f"{where} saw all of {found.asked} rounds"
    return answered(name, "reliable", said, origin=scene.origin, value=value)


def remote_store(scene: DeviceScene) -> Answer:
    """How much later a reader sees a flag that the peer stores into the reader's memory."""
    name = "remote-store"
    one, other = scene.pair()
    rounds, launches = (EMULATED_ROUNDS, 1) if scene.emulated else (VISIBILITY_ROUNDS, STORE_LAUNCHES)
    seen: dict[str, list[Rounds]] = {"local": [], "remote": []}
    sides = (("local", one), ("remote", other))
    for number in range(launches):
        # Each side is first as often as second, so that what changes over time is no difference between them.
        for key, writer in sides if number % 2 == 0 else sides[::-1]:
            seen[key].append(
                scene.hands.rounds(writer, one, readers=1, rounds=rounds, memory_class="uncached", scope="system")
            )
    lost = {key: sum(found.asked - n for found in runs for n in found.seen) for key, runs in seen.items()}
    value: dict[str, Any] = {"rounds": rounds, "launches": launches, "rounds_missed": sum(lost.values())}
    if lost["remote"] or lost["local"]:
        said = (
            f"of {launches * rounds:,} rounds a side the reader missed {lost['local']:,} from its own die and"
            f" {lost['remote']:,} from the peer"
        )
        return answered(name, "does not always arrive", said, origin=scene.origin, value=value)
    if not all(found.round_ns for runs in seen.values() for found in runs):
        why = "the emulator counts steps, not time" if scene.emulated else "there is no device clock"
        value |= {"extra_ns": None, "extra_ns_why": why}
        said = f"every one of {launches * rounds:,} rounds arrived from the peer; how much later is not told: {why}"
        return answered(name, "arrives", said, origin=scene.origin, value=value)
    return _later(scene, other.id, one.id, seen, value)


def _later(
    scene: DeviceScene, other: str, one: str, seen: Mapping[str, Sequence[Rounds]], value: dict[str, Any]
) -> Answer:
    """How much later, launch pair by launch pair: the median, and the range over the pairs."""
    local, remote = ([median(found.round_ns) for found in runs] for runs in seen.values())
    # A round is a store one way and an acknowledgement the other: half of what it grew by is one way.
    extras = [(far - near) / 2 for near, far in zip(local, remote, strict=True)]
    extra, low, high = median(extras), min(extras), max(extras)
    value |= {f"round_{key}_mean_ns": fmean(n for found in runs for n in found.round_ns) for key, runs in seen.items()}
    value |= {
        "round_local_ns": median(local), "round_remote_ns": median(remote), "extra_ns": extra, "extra_low_ns": low,
        "extra_high_ns": high, "extra_by_launch_ns": extras,
    }  # fmt: skip
    said = (
        f"a store from {other} is seen {extra:,.0f} ns later than one from {one} itself ({low:,.0f} to {high:,.0f} over"
        f" {len(extras)} pairs of launches), if both ways of a round take equally long"
    )
    if low <= CLOSE_NS < high:
        said += f"; the launches lie on both sides of {CLOSE_NS:,.0f} ns"
        return answered("remote-store", "arrives", said, origin=scene.origin, value=value)
    word = "arrives, within 0.1 us extra" if extra <= CLOSE_NS else "arrives, later than 0.1 us extra"
    return answered("remote-store", word, said, origin=scene.origin, value=value)


def remap_flushes(scene: DeviceScene) -> Answer:
    """Whether kernels read the new memory after a range was given other memory while the device was at work."""
    name = "vmm-remap"
    found = scene.hands.remap(scene.device)
    total = found.words * found.programs
    value = {
        "words": found.words, "programs": found.programs, "stale_words": found.old, "fresh_words": found.new,
        "device_was_busy": found.busy,
    }  # fmt: skip
    if found.before != total:
        why = f"before the remap {total - found.before} of {total} words were not the old memory's: nothing was cached"
        return without("unknown", name, why, origin=scene.origin, value=value)
    other = total - found.old - found.new
    meanwhile = "while other work ran" if found.busy else "with the device at rest (the remap waited for it)"
    if found.old:
        said = f"{found.old} of {total} words read after the remap were still the old memory's, {meanwhile}"
        return answered(name, "stale lines stay", said, origin=scene.origin, value=value)
    if other:
        why = f"{other} of {total} words read after the remap are of neither memory"
        return without("unknown", name, why, origin=scene.origin, value=value)
    said = f"{found.programs} programs read {found.words} words each from the new memory, {meanwhile}"
    word = "fresh, device busy" if found.busy else "fresh, device at rest"
    return answered(name, word, said, origin=scene.origin, value=value)


def launch_cost(scene: DeviceScene) -> Answer:
    """What one more kernel costs, inside a captured graph and launched from Python."""
    name = "launch-cost"
    graph, eager = scene.hands.launch_ns(scene.device)
    value = {"in_graph_ns": graph, "from_python_ns": eager}
    if graph <= 0 or eager <= 0:
        why = "more kernels took no longer: the timer is too coarse"
        return without("unknown", name, why, origin=scene.origin, value=value)
    said = f"one more one-element kernel takes {graph / 1e3:.2f} us in a graph and {eager / 1e3:.2f} us from Python"
    return answered(name, "measured", said, origin=scene.origin, value=value)


def fill(scene: DeviceScene) -> Answer:
    """How much of its own domain a device is given; asked by `mem-alloc-mode`, not by itself."""
    found = scene.hands.fill(scene.device)
    value = {"got_bytes": found.got_bytes, "domain_bytes": found.domain_bytes}
    said = f"{scene.device.id} was given {gb(found.got_bytes)}; then: {found.ended}"
    return answered("fill", "filled", said, origin=scene.origin, value=value)
