"""Which CPUs and host memory a program should have: plain decisions over a `Host`.

Two ways in: near a device (`near`), or as asked in numactl's words (`asked`). Every choice that is not the obvious
one leaves a sentence in `reasons`; nothing here changes the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dieplace import numberlist
from dieplace.binding.host import Host, HostNode
from dieplace.errors import Unsupported, UsageError

POLICIES = ("membind", "preferred", "interleave")


@dataclass(frozen=True)
class Binding:
    """CPUs (None: leave as they are) and host-memory policy (None: no call) with its nodes.

    `incomplete` says what was wanted and cannot be had; `reasons` explain choices.
    """

    cpus: tuple[int, ...] | None = None
    policy: str | None = None
    nodes: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()


def near(host: Host, device_node: int | None, *, who: str = "the device") -> Binding:
    """CPUs of the device's NUMA node and a preference for its memory, or the nearest nodes that have them.

    A node without CPUs is memory of an accelerator or an expander (vllm PR 39361: GPU memory as nodes 2, 10, 18): then
    both come from the nearest node that has CPUs. On a host with one node nothing is bound: nothing could be gained.
    """
    usable = [node for node in host.nodes if host.usable_cpus(node)]
    if len([node for node in host.nodes if node.has_memory and node.cpus]) <= 1 and len(usable) <= 1:
        return Binding(reasons=("the host has one NUMA node with CPUs: nothing to bind",))
    if device_node is None or device_node < 0:
        return Binding(incomplete=(f"{who} names no NUMA node (the firmware says -1 or nothing)",))
    home = host.node(device_node)
    if home is None:
        return Binding(incomplete=(f"{who} is on NUMA node {device_node}, which this host does not show",))
    place = _nearest(home, usable)
    if place is None:
        return Binding(incomplete=("no NUMA node has a CPU that this process may use",))
    reasons = _why_cpus(host, home, place, who)
    memory = _nearest(place, [node for node in host.nodes if host.may_allocate(node) and node.cpus]) or _nearest(
        place, [node for node in host.nodes if host.may_allocate(node)]
    )
    if memory is None:
        return Binding(host.usable_cpus(place), reasons=reasons, incomplete=("no NUMA node has memory to prefer",))
    if memory is not place:
        what = "has no memory" if not place.has_memory else "may not be allocated from (cpuset)"
        reasons = (*reasons, f"node {place.number} {what}: host memory prefers node {memory.number}")
    return Binding(host.usable_cpus(place), "preferred", (memory.number,), reasons)


def asked(
    host: Host,
    *,
    cpus: str | None = None,
    cpunodes: str | None = None,
    policy: str | None = None,
    nodes: str | None = None,
) -> Binding:
    """What `--cpus`, `--cpunodebind` and a memory option name; Unsupported names both sides of a contradiction.

    Lists are numactl's: `0-3,8`, `all`, `!2` (all but), `+0` (counted within what is allowed).
    """
    chosen: tuple[int, ...] | None = None
    if cpus is not None and cpunodes is not None:
        raise UsageError("CPUs are named twice", hint="use one of --cpus and --cpunodebind")
    if cpus is not None:
        every = tuple(sorted({cpu for node in host.nodes for cpu in node.cpus} | set(host.cpus_allowed)))
        chosen = read_list(cpus, every, host.cpus_allowed, "CPU")
        _refuse_hidden("CPU", chosen, host.cpus_allowed)
    if cpunodes is not None:
        chosen = _cpus_of_nodes(host, cpunodes)
    if policy is None or nodes is None:
        return Binding(chosen)
    return _with_memory(host, Binding(chosen), policy, nodes)


def merged(base: Binding, over: Binding) -> Binding:
    """`base` with whatever `over` says itself: what was asked goes before what is near."""
    cpus = over.cpus if over.cpus is not None else base.cpus
    policy, nodes = (over.policy, over.nodes) if over.policy is not None else (base.policy, base.nodes)
    return Binding(cpus, policy, nodes, (*base.reasons, *over.reasons), (*base.incomplete, *over.incomplete))


def share(host: Host, binding: Binding, index: int, count: int) -> Binding:
    """Part `index` of `count` disjoint parts of a binding's CPUs, whole cores each: hyper-threads stay together."""
    cpus = binding.cpus if binding.cpus is not None else host.cpus_allowed
    if count <= 1:
        return binding
    cores: list[tuple[int, ...]] = []
    for cpu in cpus:
        core = tuple(c for c in host.siblings.get(cpu, (cpu,)) if c in cpus) or (cpu,)
        if core not in cores:
            cores.append(core)
    if len(cores) < count:
        told = f"{count} processes share {len(cores)} cores ({numberlist.show(cpus)}): their CPU sets overlap"
        return replace(binding, cpus=cores[index % len(cores)], incomplete=(*binding.incomplete, told))
    low, high = index * len(cores) // count, (index + 1) * len(cores) // count
    return replace(binding, cpus=tuple(sorted(cpu for core in cores[low:high] for cpu in core)))


def read_list(text: str, every: Sequence[int], allowed: Sequence[int], what: str) -> tuple[int, ...]:
    """Numbers that a numactl list names; UsageError for other text or an empty answer."""
    body = text.strip()
    try:
        if body == "all":
            found = tuple(allowed)
        elif body.startswith("!"):
            found = tuple(n for n in every if n not in numberlist.parse(body[1:]))
        elif body.startswith("+"):
            found = tuple(allowed[index] for index in numberlist.parse(body[1:]))
        else:
            found = numberlist.parse(body)
    except ValueError as error:
        raise UsageError(
            f"cannot read {text!r} as {what} numbers: {error}", hint="write 0-3,8, all, !2 or +0"
        ) from error
    except IndexError:
        raise UsageError(
            f"{text!r} counts beyond the {len(allowed)} {what}s that are allowed", hint="+0 is the first of them"
        ) from None
    if not found:
        raise UsageError(f"{text!r} names no {what}", hint="write 0-3,8, all, !2 or +0")
    return found


def _nearest(home: HostNode, nodes: Sequence[HostNode]) -> HostNode | None:
    return min(nodes, key=lambda node: (home.distance(node.number), node.number), default=None)


def _why_cpus(host: Host, home: HostNode, place: HostNode, who: str) -> tuple[str, ...]:
    if place is home:
        limited = len(host.usable_cpus(home)) < len(home.cpus)
        return (f"{len(host.usable_cpus(home))} of node {home.number}'s {len(home.cpus)} CPUs are allowed",) * limited
    what = "has no CPUs" if not home.cpus else "has no CPU that this process may use"
    far = home.distance(place.number)
    return (f"{who} is on node {home.number}, which {what}: node {place.number} is nearest (distance {far})",)


def _refuse_hidden(what: str, chosen: Sequence[int], allowed: Sequence[int]) -> None:
    hidden = [number for number in chosen if number not in allowed]
    if hidden:
        raise Unsupported(
            f"{what} {numberlist.show(hidden)} was asked for, and this process may use {numberlist.show(allowed)} only",
            hint="the caller's affinity or cpuset decides: start it elsewhere, or name others",
            asked=numberlist.show(chosen),
            allowed=numberlist.show(allowed),
        )


def _known_nodes(host: Host, text: str) -> tuple[int, ...]:
    every = tuple(node.number for node in host.nodes)
    allowed = every if host.mems_allowed is None else tuple(n for n in every if n in host.mems_allowed)
    chosen = read_list(text, every, allowed, "node")
    missing = [number for number in chosen if number not in every]
    if missing:
        raise Unsupported(
            f"NUMA node {numberlist.show(missing)} was asked for, and this host has {numberlist.show(every)}",
            hint="see: dieplace --backend cpu topo",
            asked=numberlist.show(chosen),
            known=numberlist.show(every),
        )
    return chosen


def _cpus_of_nodes(host: Host, text: str) -> tuple[int, ...]:
    numbers = _known_nodes(host, text)
    chosen = [node for node in host.nodes if node.number in numbers]
    cpus = tuple(sorted(cpu for node in chosen for cpu in host.usable_cpus(node)))
    if not cpus:
        raise Unsupported(
            f"NUMA node {numberlist.show(numbers)} has no CPU that this process may use"
            f" (it may use {numberlist.show(host.cpus_allowed)})",
            hint="name a node that has one of them",
            asked=numberlist.show(numbers),
            allowed=numberlist.show(host.cpus_allowed),
        )
    return cpus


def _with_memory(host: Host, binding: Binding, policy: str, text: str) -> Binding:
    numbers = _known_nodes(host, text)
    if policy == "preferred" and len(numbers) > 1:
        raise UsageError(f"--preferred takes one node, not {text!r}", hint="use --membind or --interleave for several")
    if len(host.nodes) == 1:
        told = f"the host has one NUMA node: {policy} changes nothing, and no call is made"
        return replace(binding, reasons=(*binding.reasons, told))
    empty = [node.number for node in host.nodes if node.number in numbers and not node.has_memory]
    if empty:
        raise Unsupported(f"NUMA node {numberlist.show(empty)} has no memory", hint="name a node that has some")
    if host.mems_allowed is not None:
        _refuse_hidden("memory of node", numbers, host.mems_allowed)
    return replace(binding, policy=policy, nodes=numbers)
