"""Every question of first light, in the order of the answers' page."""

from __future__ import annotations

from dieplace.errors import UsageError
from dieplace.experiments import first_light_devices as devices
from dieplace.experiments import first_light_node as node
from dieplace.experiments import first_light_runs as runs
from dieplace.experiments import first_light_seen as seen
from dieplace.experiments.first_light_marker import after_reboot
from dieplace.experiments.first_light_questions import Question

EVERYWHERE = ("amd", "emulated", "nvidia")

QUESTIONS: tuple[Question, ...] = (
    Question(
        "peer-access", "Does a kernel on one die read and write the other die's memory, and does the runtime say so?",
        "asks the runtime, then writes 2 MiB from a kernel and reads it there and at its owner",
        "the swapped arm and every hand-off need it", ("yes", "no", "runtime and kernels disagree"), "devices",
        devices.peer_access, EVERYWHERE, needs_peer=True,
    ),
    Question(
        "uncached-memory", "What does an uncached request return: device memory, from which pool, or host memory?",
        "one uncached request of 2 MiB: the runtime's word, the layer below it, latency of warm reads",
        "flags in host memory would be polled across PCIe",
        ("extended device memory", "other device memory", "host memory"), "devices", devices.uncached_memory,
        needs_peer=True, elsewhere="CUDA has no memory class to ask for: peers read at the home's cache",
    ),
    Question(
        "poll-reliability", "Do polls inside one device see every store of a flag in cached local memory?",
        "one writer, readers on every XCD, thousands of rounds, agent-scope (sc1) polls",
        "a poll that never sees its flag hangs a step", ("reliable", "unreliable"), "devices",
        devices.poll_reliability, EVERYWHERE, needs_peer=True,
    ),
    Question(
        "remote-store", "How much later does a local poller see a store that comes from the other die?",
        "rounds of one flag with the writer here and there; half of what a round grows by",
        "it is the price of a hand-off between dies",
        ("arrives, within 0.1 us extra", "arrives, later than 0.1 us extra", "arrives", "does not always arrive"),
        "devices", devices.remote_store, EVERYWHERE, needs_peer=True,
    ),
    Question(
        "vmm-remap", "Do kernels read the new memory when a range was remapped under their addresses?",
        "reads a cached range from every core, remaps it while other work runs, and reads it again",
        "swapping the backing between arms would measure stale lines",
        ("fresh, device busy", "fresh, device at rest", "stale lines stay"), "devices", devices.remap_flushes,
        EVERYWHERE, needs_peer=True,
    ),
    Question(
        "offered-modes", "Which modes does the driver offer in each memory mode?",
        "reads the mode files in every state, and asks the driver's own table", "it depends on the driver's date",
        ("listed", "listed in part"), "end", lambda s: seen.offered_modes(s.seen),
    ),
    Question(
        "nps2-after-reboot", "Does NPS2 survive a reboot and a power cycle?",
        "compares the memory mode with a marker that the last first light left under another boot",
        "whether a mode must be set at each boot", ("survives", "lost"), "end",
        lambda s: after_reboot(s.marker, s.facts, s.journal, origin=s.seen.origin),
    ),
    Question(
        "reload-times", "How long do unload, load and ready take?",
        "times the steps of each switch that reloads", "limits of a switch", ("measured", "emulated"), "end",
        lambda s: seen.reload_times(s.seen),
    ),
    Question(
        "node-order", "Where do the KFD nodes of a card go that is switched alone?",
        "switches one card and compares node numbers", "HIP's device order follows them",
        ("appended", "in place", "mixed"), "end", lambda s: seen.node_order(s.seen),
    ),
    Question(
        "range-sizes", "Do both ranges of NPS2 have the same size?",
        "reads the size of each partition's memory bank", "what fits on a die",
        ("equal", "nearly equal", "unequal"), "end", lambda s: seen.range_sizes(s.seen),
    ),
    Question(
        "sibling-ids", "Do partitions of one card share their unique_id?",
        "compares KFD's ids within a card", "whether an id names a device or a package",
        ("equal", "distinct", "differs by card or mode"), "end", lambda s: seen.sibling_ids(s.seen, s.ids),
    ),
    Question(
        "drm-client", "Does a process that only has a render node open block a compute switch?",
        "sets another compute mode on that card, with one open and without in turn, and puts it back",
        "who must be gone before a switch",
        ("blocks", "does not block"), "node", node.drm_client, needs_peer=True,
    ),
    Question(
        "amdsmi-descriptors", "Does an initialised amdsmi hold files that block an unload?",
        "lists a child's descriptors before and after init, after getters and after shutdown",
        "why the library is only called in a child",
        ("holds until shutdown", "holds, even after shutdown", "holds none"), "node", node.library_descriptors,
    ),
    Question(
        "kfd-counters", "May another user read a process's bytes on each die?",
        "reads KFD's vram_ file of a process as nobody", "who can see holders",
        ("readable", "not readable"), "node", node.kfd_counters,
    ),
    Question(
        "amdsmi-init-unloaded", "What does amdsmi_init say while the driver is unloaded?",
        "calls it in a child between unload and load", "what a tool sees in the middle of a switch",
        ("fails", "succeeds", "hangs"), "end",
        lambda s: seen.init_while_unloaded(s.seen),
    ),
    Question(
        "die-affinity", "Do the XCDs of partition k lie on the die of range k?",
        "compares each partition's latency to both ranges", "what local means at all",
        ("own range is near", "other range is near", "no difference"), "end",
        lambda s: runs.die_affinity(s.ran), EVERYWHERE,
    ),
    Question(
        "mem-alloc-mode", "Can a die take from the other range where the cap is lifted?",
        "writes ALL, reads the sizes, fills one device until it is full, and writes back what was there",
        "whether a full die is an error or a silent spill",
        ("can spill", "cannot spill", "cannot spill, by its sizes", "no such file"), "node", node.alloc_mode,
        needs_peer=True,
    ),
    Question(
        "near-far-latency", "What is the latency of near and of far memory?",
        "the link run", "distance is one of the model's terms", ("measured", "emulated"), "end",
        lambda s: runs.near_far_latency(s.ran), EVERYWHERE,
    ),
    Question(
        "link-directions", "Does the link carry its rate in both directions at once?",
        "the link run, one device reading far and both",
        "it alone decides the link term of the model", ("each direction by itself", "directions share"), "end",
        lambda s: runs.link_directions(s.ran), EVERYWHERE,
    ),
    Question(
        "cache-bandwidth", "How fast is the last cache?",
        "the link run's warm reads", "what a warm operand gains", ("measured", "emulated"), "end",
        lambda s: runs.cache_bandwidth(s.ran), EVERYWHERE,
    ),
    Question(
        "latency-by-stack", "Does latency differ between HBM stacks?",
        "not by any means known to be public", "whether a die is one place", ("measured",), "end",
        lambda s: runs.latency_by_stack(s.ran), EVERYWHERE,
    ),
    Question(
        "launch-cost", "What does one more kernel cost?",
        "the slope over 64 and 512 one-element kernels, captured and not", "what fusing saves", ("measured",),
        "devices", devices.launch_cost, EVERYWHERE,
    ),
    Question(
        "published-terms", "Under which precision and context were the published figures taken?",
        "by no machine", "what a residual means", ("told",), "end",
        lambda s: runs.published_terms(s.ran), EVERYWHERE,
    ),
)  # fmt: skip
# Asked by another question, never listed.
_FILL = Question(
    "fill", "How much of its own range is a device given?", "takes memory until it is refused",
    "part of mem-alloc-mode", ("filled",), "devices", devices.fill,
)  # fmt: skip


def question(name: str) -> Question:
    """The question called `name`; UsageError lists the names."""
    for one in (*QUESTIONS, _FILL):
        if one.id == name:
            return one
    known = ", ".join(one.id for one in QUESTIONS)
    raise UsageError(f"first light has no question {name!r}", hint=f"there is {known}", asked=name)
