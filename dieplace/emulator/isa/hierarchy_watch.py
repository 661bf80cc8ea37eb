"""Notices loads that return old bytes, says why, and decides when that is a fault.

An old value is no fault by itself: a poll may be early. It is one when

- a wave keeps getting the old value from a copy that no time will refresh (`patience` loads): a hand-off compiled with
  the wrong scope or cache bits, told apart by whose bits are wrong;
- the reader has already seen a flag that the same workgroup stored *after* the data: the data was not written back, the
  write-back was not waited for, or the reader did not invalidate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TypeVar

from dieplace.emulator.isa.faults import IsaFault
from dieplace.emulator.isa.hierarchy_lines import Writer

Fault = TypeVar("Fault", bound=IsaFault)
_SCOPES = ("no scope bits", "workgroup scope (sc0)", "agent scope (sc1)", "system scope (sc0 sc1)")
EVENTS = 100_000
_RIGHT = "a hand-off between XCDs needs sc1, one between dies sc0 sc1, on the load and on the store"


class StaleRead(IsaFault):
    """A hand-off that cannot be seen; facts: cause, buffer, address, expected, found, store (the other instruction)."""

    word = "stale-read"


class FlagBeforeData(IsaFault):
    """A flag was seen before the data it stands for; facts as StaleRead."""

    word = "flag-before-data"


@dataclass(frozen=True)
class OldLoad:
    """Old bytes that a load returned: where from (`L1`, `L2` or `memory`), and whose store it misses."""

    launch: int
    workgroup: int
    wave: int
    line: int
    text: str
    scope: int
    nt: bool
    buffer: str
    address: int
    source: str
    writer: Writer
    found: str
    newest: str
    xcd: int
    peer: bool  # the reader is on another die than the line
    unfinished: bool = False  # a write-back of these bytes was started and not waited for
    will_arrive: bool = False  # time alone makes it visible


@dataclass(frozen=True)
class FlagEvent:
    """A workgroup stored a flag (`kind` "stored"), or first loaded one newer than it had seen ("seen")."""

    kind: str
    launch: int
    workgroup: int
    buffer_line: int


@dataclass(frozen=True)
class OldLoads:
    """All old loads of one instruction from one source: how many, the cause in a word, and the first of them."""

    cause: str
    count: int
    first: OldLoad


class Watch:
    """Old loads of one run, and which flags each workgroup has seen."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.events: list[FlagEvent] = []  # in the order of this run, the first EVENTS of them
        self._seen: dict[tuple[int, int], dict[tuple[int, int], int]] = defaultdict(dict)
        self._count: Counter[tuple[int, int, int, str]] = Counter()
        self._first: dict[tuple[int, int, str], OldLoads] = {}
        self._last: dict[tuple[int, int], OldLoad] = {}

    def stored_flag(self, writer: Writer, line: int) -> None:
        """`writer` stored with a scope: it may be a flag."""
        self._event("stored", writer.who, line)

    def saw_flag(self, reader: tuple[int, int], writer: Writer, line: int) -> None:
        """`reader` loaded a value that `writer` stored with a scope: its earlier stores are now owed."""
        seen = self._seen[reader]
        if writer.time > seen.get(writer.who, -1):
            seen[writer.who] = writer.time
            self._event("seen", reader, line)

    def _event(self, kind: str, who: tuple[int, int], line: int) -> None:
        if len(self.events) < EVENTS:
            self.events.append(FlagEvent(kind, *who, line))

    def old_load(self, load: OldLoad) -> None:
        """Count an old load; raises FlagBeforeData or StaleRead when it can be no early poll."""
        cause = cause_of(load)
        key = (load.launch, load.line, cause)
        known = self._first.get(key) or OldLoads(cause, 0, load)
        self._first[key] = replace(known, count=known.count + 1)
        self._last[load.launch, load.line] = load
        owed = self._seen.get((load.launch, load.workgroup), {}).get(load.writer.who, -1)
        if owed >= load.writer.time:
            raise _before(load)
        if load.will_arrive:
            return
        self._count[load.launch, load.line, load.wave, cause] += 1
        if self._count[load.launch, load.line, load.wave, cause] > self.patience:
            raise explain(load)

    def stalled(self, launch: int, line: int) -> StaleRead | None:
        """The fault behind a loop that polls at `line` without end, if old bytes are the reason."""
        last = self._last.get((launch, line))
        return explain(last) if last is not None and not last.will_arrive else None

    @property
    def summary(self) -> tuple[OldLoads, ...]:
        """Every instruction that loaded old bytes, most often first."""
        return tuple(sorted(self._first.values(), key=lambda x: -x.count))


def cause_of(load: OldLoad) -> str:
    """One word for what is wrong: the load's own bits come first, then those of the store it misses."""
    if load.nt and load.scope < 2:
        return "nontemporal"
    if load.source == "L2" and load.scope == 2:
        return "agent-scope-peer"
    if load.scope < 2:
        return "workgroup-scope" if load.scope == 1 else "unscoped"
    if load.writer.nt and load.writer.scope < 2:
        return "nontemporal-store"
    return "workgroup-scope-store" if load.writer.scope == 1 else "no-write-back"


def explain(load: OldLoad) -> StaleRead:
    """The error for a poll that can never end."""
    cause = cause_of(load)
    bits = _SCOPES[load.scope]
    what = {
        "nontemporal": "`nt` is a caching hint and gives no scope",
        "agent-scope-peer": f"{bits} covers this logical device only, and the line lies on the peer die (type NC)",
        "workgroup-scope": f"{bits} may be served by the CU's own L1 for ever",
        "unscoped": "a load without scope bits may be served by the CU's own L1 for ever",
        "nontemporal-store": "the store's `nt` is a caching hint: it stays dirty in the L2 of its XCD",
        "workgroup-scope-store": "the store has workgroup scope (sc0): it stays dirty in the L2 of its XCD",
        "no-write-back": "the store has no scope and nothing wrote it back: it stays dirty in the L2 of its XCD",
    }[cause]
    if load.source == "memory" and load.scope < 2 and load.writer.scope < 2:
        store = "`nt`" if load.writer.nt else _SCOPES[load.writer.scope]
        what += f", and here the store has {store} too and stays dirty in the L2 of its XCD"
    where = {"L1": "its CU's L1", "L2": f"the L2 of XCD {load.xcd}", "memory": "memory"}[load.source]
    return _fault(
        StaleRead,
        load,
        f"stale read of {load.buffer} at {load.address:#x}: {what}; it got {load.found} from {where}, "
        f"`{load.writer.text}` (line {load.writer.line}) stored {load.newest}",
        _RIGHT,
        cause,
    )


def _before(load: OldLoad) -> FlagBeforeData:
    data = f"{load.buffer} at {load.address:#x}, stored by `{load.writer.text}` (line {load.writer.line})"
    if load.source != "memory":
        text, hint = "the reader did not invalidate its copy after the flag", "use an acquire load or fence"
        cause = "no-invalidate"
    elif load.writer.scope >= 2:
        text, hint = "the data store was not waited for", "s_waitcnt vmcnt(0) between the data and the flag store"
        cause = "store-not-waited"
    elif load.unfinished:
        text, hint = "the write-back was not waited for", "s_waitcnt vmcnt(0) between the write-back and the flag store"
        cause = "write-back-not-waited"
    else:
        text, hint = "the data was not written back before the flag", "use a release store or fence"
        cause = "no-write-back"
    return _fault(FlagBeforeData, load, f"a flag was seen before its data: {data}; {text}", hint, cause)


def _fault(kind: type[Fault], load: OldLoad, message: str, hint: str, cause: str) -> Fault:
    return kind(
        message,
        hint=hint,
        cause=cause,
        buffer=load.buffer,
        address=load.address,
        found=load.found,
        expected=load.newest,
        store=load.writer.text,
        store_line=load.writer.line,
        waiting_workgroup=load.workgroup,
    )
