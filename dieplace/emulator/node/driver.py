"""The driver's state machine: each event is a plain function from a state to the next one and an errno.

Source: `aqua_vanjaram.c`, `amdgpu_gfx.c`, `amdgpu_gmc.c`, `amdgpu_xgmi.c`, `kfd_device.c` of the amdgpu driver.
An errno of None is success. A failed event may still change the state: an injected fault is used up.
"""

from __future__ import annotations

import errno
from dataclasses import replace

from . import rules
from .entries import driven_cards, live_partitions
from .state import CardState, Fault, Hive, NodeState, new_boot_id

Outcome = tuple[NodeState, int | None]
LOG_LINES = 200


def noted(state: NodeState, line: str) -> NodeState:
    """The state with one more kernel log line; the oldest ones fall away."""
    return replace(state, log=(*state.log, line)[-LOG_LINES:])


def take_fault(state: NodeState, step: str, card: int | None = None) -> tuple[NodeState, Fault | None]:
    """The first fault injected for this step and card, used up once, and the state without it."""
    for index, fault in enumerate(state.faults):
        if fault.step == step and fault.card in (None, card):
            left = None if fault.times is None else fault.times - 1
            rest = [replace(fault, times=left)] if left is None or left > 0 else []
            return replace(state, faults=(*state.faults[:index], *rest, *state.faults[index + 1 :])), fault
    return state, None


def write_compute(state: NodeState, card: int, text: str) -> Outcome:
    """Switch one card at once; its KFD nodes go, and the new ones come at the end of the list."""
    state, fault = take_fault(state, "write_compute", card)
    if fault is not None and fault.error is not None:
        return state, fault.error
    refusal = _refused(state, card)
    if refusal is not None:
        return state, refusal
    word = rules.read_compute_word(text, state.model.xccs)
    if word is None:
        return state, errno.EINVAL
    nps = int(state.memory_of(card)[3:])
    if nps not in rules.nps_of(word, state.model.gfx, state.style.nps_table):
        return noted(state, f"{state.cards[card].bdf}: Invalid compute partition mode requested, requested: {word}, "
                            f"available memory partitions: {nps}"), errno.EINVAL  # fmt: skip
    if word == state.cards[card].compute:
        return state, None
    if _compute_users(state, card):
        return state, errno.EBUSY
    return _switch(state, card, word)


def _switch(state: NodeState, card: int, word: str) -> Outcome:
    state, broken = take_fault(state, "kfd_init", card)
    others = tuple(pair for pair in state.kfd_order if pair[0] != card)
    removed = len(state.kfd_order) - len(others)
    state = state.with_card(card, compute=word)
    added = () if broken else tuple((card, p) for p in live_partitions(state, card))
    state = replace(state, kfd_order=others + added, generation=state.generation + removed + len(added))
    if broken is None:
        return state, None
    return noted(state, f"{state.cards[card].bdf}: kfd did not come back after a partition switch"), (
        broken.error or errno.EIO
    )


def write_memory(state: NodeState, card: int, text: str) -> Outcome:
    """Record the wish for the whole hive; nothing visible changes until the driver is unloaded."""
    state, fault = take_fault(state, "write_memory", card)
    if fault is not None and fault.error is not None:
        return state, fault.error
    if state.shown(card) and not state.memory_caps:
        return state, errno.EACCES
    refusal = _refused(state, card)
    if refusal is not None:
        return state, refusal
    word, bdf = rules.read_memory_word(text), state.cards[card].bdf
    if word is None or word not in state.memory_caps:
        return state, errno.EINVAL
    if word == state.memory_of(card):
        return noted(state, f"{bdf}: requested NPS mode is same as current NPS mode, skipping"), None
    hives = list(state.hives)
    hives[state.cards[card].hive] = replace(hives[state.cards[card].hive], wish=word)
    state = replace(state, hives=tuple(hives))
    return noted(state, f"{bdf}: NPS mode change requested, please remove and reload driver"), None


def write_config(state: NodeState, card: int, text: str) -> Outcome:
    """`xcp_config`: select which mode the config folder describes; switches nothing."""
    refusal = _refused(state, card)
    if refusal is not None:
        return state, refusal
    word = rules.read_compute_word(text, state.model.xccs)
    if word is None or word not in rules.supported_compute(state.model.xccs):
        return state, errno.EINVAL
    return state.with_card(card, asked=word), None


def write_alloc_mode(state: NodeState, card: int, text: str) -> Outcome:
    """`compute_partition_mem_alloc_mode`: CAPPING limits a partition to its share, ALL lifts the cap."""
    refusal = _refused(state, card)
    if refusal is not None:
        return state, refusal
    word = text.strip().upper()
    return (state, errno.EINVAL) if word not in ("CAPPING", "ALL") else (state.with_card(card, alloc_mode=word), None)


def _refused(state: NodeState, card: int) -> int | None:
    if not state.shown(card):
        return errno.ENODEV
    if state.uid != 0 or state.style.virtual_function:
        return errno.EACCES
    return errno.EPERM if state.cards[card].in_reset else None


def _compute_users(state: NodeState, card: int) -> list[int]:
    if state.style.lock == "node":
        return [p.pid for p in state.processes if p.kfd_open or p.attached]
    return [p.pid for p in state.processes if card in p.attached]


def module_users(state: NodeState) -> list[int]:
    """Processes that keep the module in use: open device files, and ghosts (seen with exporters that closed theirs)."""
    ghosts = state.style.ghosts_block_unload
    return [p.pid for p in state.processes if p.kfd_open or p.render or (ghosts and p.attached)]


def unload(state: NodeState) -> Outcome:
    """Remove the driver; this is where a pending memory wish becomes real, for every card of its hive."""
    state, fault = take_fault(state, "unload")
    if fault is not None and fault.error is not None:
        return state, fault.error
    if state.uid != 0:
        return state, errno.EPERM
    if not state.loaded:
        return state, errno.ENOENT
    if module_users(state):
        return state, errno.EAGAIN
    for index, hive in enumerate(state.hives):
        if hive.wish is not None:
            state = _apply_wish(state, index, hive)
    return replace(state, loaded=False, kfd_order=()), None


def _apply_wish(state: NodeState, index: int, hive: Hive) -> NodeState:
    state, failed = take_fault(state, "nps_switch")
    done = replace(hive, wish=None) if failed else Hive(hive.wish or hive.memory)
    hives = (*state.hives[:index], done, *state.hives[index + 1 :])
    line = "request failed" if failed else "request done, reload driver to complete the change"
    return noted(replace(state, hives=hives), f"hive {index}: NPS mode change {line}")


def load(state: NodeState, now_s: float) -> Outcome:
    """Insert the driver: every card gets the automatic compute mode for its memory mode, in probe order."""
    state, fault = take_fault(state, "load")
    if fault is not None and fault.error is not None:
        return state, fault.error
    if state.uid != 0:
        return state, errno.EPERM
    if state.loaded:
        return state, None
    driven, style = driven_cards(state), state.style
    words = {card: _automatic(state, card) for card in driven}
    if None in words.values():
        return noted(state, "amdgpu: no compatible compute partition mode for the memory partition mode"), errno.EINVAL
    state = replace(state, loaded=True, loads=state.loads + 1, kfd_order=())
    for order, card in enumerate(driven, start=1):
        word = words[card] or "SPX"
        appears = now_s + style.slow_start_s * order / len(driven) if style.slow_start_s else None
        usable = (appears or now_s) + style.slow_eperm_s if style.slow_eperm_s else None
        state = state.with_card(card, compute=word, asked=word, alloc_mode="CAPPING", in_reset=False,
                                appears_s=appears, usable_s=usable)  # fmt: skip
        if appears is None:
            state = _enter_topology(state, card)
    return state, None


def _automatic(state: NodeState, card: int) -> str | None:
    model = state.model
    return rules.automatic_compute(model.xccs, int(state.memory_of(card)[3:]), model.apu, state.style.auto_rule)


def _enter_topology(state: NodeState, card: int) -> NodeState:
    state = state.with_card(card, appears_s=None)
    added = tuple((card, p) for p in live_partitions(state, card))
    return replace(state, kfd_order=state.kfd_order + added, generation=state.generation + len(added))


def settle(state: NodeState, now_s: float) -> NodeState:
    """Let the cards appear whose time has come; the same object where nothing is due."""
    for card, item in enumerate(state.cards):
        if state.loaded and item.appears_s is not None and item.appears_s <= now_s:
            state = _enter_topology(state, card)
    return state


def starting(card: CardState, now_s: float) -> bool:
    """Whether a card that has appeared still answers EPERM."""
    return card.usable_s is not None and now_s < card.usable_s


def reboot(state: NodeState, now_s: float, keep_memory_mode: bool) -> Outcome:
    """A new boot: wishes and processes are gone; whether the memory mode is kept is undocumented, so it is asked."""
    hives = tuple(Hive(hive.memory if keep_memory_mode else "NPS1") for hive in state.hives)
    uid = state.uid
    state = replace(
        state, hives=hives, boot_id=new_boot_id(), processes=(), loaded=False, generation=1, log=(), loads=0, uid=0
    )
    state, error = load(state, now_s)
    return replace(state, uid=uid), error
