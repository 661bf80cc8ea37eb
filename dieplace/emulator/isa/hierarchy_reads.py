"""A load of lines that are not simply the newest memory: hidden bytes and old copies are put in, and noted."""

from __future__ import annotations

import numpy as np

from dieplace.emulator.isa.hierarchy_caches import AGENT, Access, Caches
from dieplace.emulator.isa.hierarchy_lines import FLAG, OLD_L1, OLD_L2, OldCopy
from dieplace.emulator.isa.hierarchy_map import HOST, LINE_BYTES, PAGE_LINES
from dieplace.emulator.isa.hierarchy_pending import PendingWork
from dieplace.emulator.isa.hierarchy_watch import OldLoad, Watch

NOTED = 16  # old elements of one instruction that are looked at one by one


def careful_load(
    a: Access, caches: Caches, watch: Watch, pending: PendingWork, data: np.ndarray, taint: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """`data` (newest) and never-written bits as this load's waves may see them; may raise the watch's faults."""
    size = a.request.size
    new = np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1)
    out = new.copy()
    bits = np.zeros(out.shape, np.uint8) if taint is None else taint.view(np.uint8).reshape(out.shape).copy()
    line, offset = a.bytes()
    line = np.minimum(line, caches.map.count - 1)
    hidden = _put_hidden(a, caches, out[:, :size], bits[:, :size], line, offset)
    copies = _put_copies(a, caches, out[:, :size], bits[:, :size])
    old = (new != out).any(axis=1)
    if a.scope >= AGENT:
        saw_flags(a, caches, watch, old)
    for e in np.flatnonzero(old)[:NOTED]:
        note = _note(a, caches, pending, int(e), new[e, :size], out[e, :size], line[e], hidden[e], copies.get(int(e)))
        if note is not None:
            watch.old_load(note)
    return out.view(np.uint32), (bits.view(np.uint32) if bits.any() else None)


def _put_hidden(
    a: Access, caches: Caches, out: np.ndarray, bits: np.ndarray, line: np.ndarray, offset: np.ndarray
) -> np.ndarray:
    """Bytes that another XCD has dirty are seen as they were before; which they are, bool[N, size]."""
    rows = caches.lines.slot[line]
    owner = caches.lines.owner[rows, offset]
    hidden = (owner != 0) & (owner != (np.repeat(a.xcd, a.counts) + 1)[:, None])
    if hidden.any():
        out[hidden] = caches.lines.old[rows, offset][hidden]
        if caches.lines.old_unwritten is not None:
            bits[hidden] = np.where(caches.lines.old_unwritten[rows, offset][hidden], 0xFF, 0)
    return hidden


def _put_copies(a: Access, caches: Caches, out: np.ndarray, bits: np.ndarray) -> dict[int, tuple[str, OldCopy]]:
    """Old copies that this load may use; element -> where the copy is, and the copy."""
    used: dict[int, tuple[str, OldCopy]] = {}
    marked = np.flatnonzero(caches.lines.marks[a.lines] & (OLD_L1 | OLD_L2))
    for i, span in a.spans(marked):
        source, copy = caches.copy_for(a.scope, int(a.xcd[i]), int(a.cu[i]), int(a.lines[i]))
        if copy is None:
            continue
        offset = (a.request.address[span] % LINE_BYTES)[:, None] + np.arange(a.request.size)
        inside, at = offset < LINE_BYTES, np.minimum(offset, LINE_BYTES - 1)
        out[span] = np.where(inside, copy.data[at], out[span])
        if copy.unwritten is not None:
            bits[span] = np.where(inside, np.where(copy.unwritten[at], 0xFF, 0), bits[span])
        used.update(dict.fromkeys(range(span.start, span.stop), (source, copy)))
    return used


def saw_flags(a: Access, caches: Caches, watch: Watch, old: np.ndarray) -> None:
    """Workgroups that loaded the newest value of a scoped store have seen that flag; `old` elements have not."""
    if not caches.lines.flags:
        return
    runs = np.flatnonzero(caches.lines.marks[a.lines] & FLAG)
    for i in runs[:256]:
        if not old[a.first[i]]:
            reader = (a.request.launch.index, int(a.request.launch.workgroup[a.waves[i]]))
            watch.saw_flag(reader, caches.lines.flags[int(a.lines[i])], int(a.lines[i]))


def _note(
    a: Access,
    caches: Caches,
    pending: PendingWork,
    e: int,
    new: np.ndarray,
    out: np.ndarray,
    line: np.ndarray,
    hidden: np.ndarray,
    copy: tuple[str, OldCopy] | None,
) -> OldLoad | None:
    r, at = a.request, int(line[0])
    if copy is None and hidden.any():
        at = int(line[hidden][0])
    row = int(caches.lines.slot[at])
    changed = int(np.flatnonzero(new != out)[0])
    dword = at * (LINE_BYTES // 4) + (int(r.address[e]) + changed) % LINE_BYTES // 4
    known = (caches.lines.writers.get(dword), copy[1].writer if copy else caches.lines.writer_of[row])
    candidates = [writer for writer in known if writer is not None]
    if not candidates:
        return None
    writer = max(candidates, key=lambda w: w.time)
    wave = int(r.waves[e])
    xcd = int(r.launch.xcd[wave])
    home = int(caches.map.page_home[at // PAGE_LINES])
    owner = int(caches.lines.owner[row].max()) - 1
    return OldLoad(
        launch=r.launch.index,
        workgroup=int(r.launch.workgroup[wave]),
        wave=wave,
        line=r.inst.line,
        text=r.inst.text,
        scope=a.scope,
        nt=bool(r.inst.nt),
        buffer=caches.map.buffer_at(at).name,
        address=int(r.address[e]),
        source=copy[0] if copy else "memory",
        writer=writer,
        found="0x" + bytes(out)[::-1].hex(),
        newest="0x" + bytes(new)[::-1].hex(),
        xcd=xcd,
        peer=home not in (HOST, int(caches.die[xcd])),
        unfinished=pending.unfinished(owner),
        will_arrive=copy is None and pending.will_arrive(at),
    )
