"""Moving memory data between element arrays and VGPR rows, with the never-written bits that come along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group, TaintAppeared
from dieplace.emulator.isa.state import ALL_BITS, I32, LANES, U32
from dieplace.emulator.isa.table import Run, mask_of


def gather(g: Group, key: int, words: int, half: int = 0) -> np.ndarray:
    """uint32 [N, words] of the active lanes of `words` rows from `key` on; `half` 1 takes upper halves."""
    if g.full:
        whole = np.empty((g.n, LANES, words), U32)
        for k in range(words):
            whole[:, :, k] = g.u[key + k]
        data = whole.reshape(-1, words)
    else:
        active = g.active
        data = np.empty((len(active[0]), words), U32)
        for k in range(words):
            data[:, k] = g.u[key + k][active]
    return data >> U32(16) if half else data


def deliver(
    g: Group,
    key: int,
    data: np.ndarray,
    taint: np.ndarray | None,
    size: int,
    signed: bool,
    half: int | None,
    origin: Callable[[], str],
) -> None:
    """Write element data to rows; `half` 0 or 1 keeps the other half of the register (d16 forms).

    Raises TaintAppeared after writing when never-written bits arrived, so that the block goes on tracking.
    """
    if signed:
        shift = I32(32 - 8 * size)
        data = (data.view(I32) << shift >> shift).view(U32)
    for k in range(data.shape[1]):
        row, column = g.u[key + k], data[:, k]
        if half is not None:
            old = row.reshape(-1) if g.full else row[g.active]
            column = (old & U32(0xFFFF0000)) | (column & U32(0xFFFF)) if half == 0 else (
                (old & U32(0xFFFF)) | column << U32(16))  # fmt: skip
        if g.full:
            row[...] = column.reshape(row.shape)
        else:
            row[g.active] = column
    if taint is not None and taint.any():
        _bring(g, key, taint, size, signed, half, origin())
        raise TaintAppeared


def _bring(g: Group, key: int, taint: np.ndarray, size: int, signed: bool, half: int | None, origin: str) -> None:
    if signed:
        taint = np.where(taint != 0, ALL_BITS, U32(0))
    for k in range(taint.shape[1]):
        bits = np.zeros((g.n, LANES), U32)
        column = taint[:, k]
        if half is not None:
            column = (column & U32(0xFFFF)) << U32(16 * half)
        if g.full:
            bits[...] = column.reshape(g.n, LANES)
        else:
            bits[g.active] = column
        old = g.taint(key + k)
        if half is not None and old is not None:
            bits |= old & U32(0xFFFF if half else 0xFFFF0000)
        g.set_taint(key + k, bits, None if g.full else g.mask, origin)


def track_load(run: Run, addresses: tuple[int, ...], writes: tuple[int, ...], half: int | None) -> Run:
    """The tracking form of a load: its address must be written, what it loads replaces never-written bits."""
    mask = mask_of((*addresses, *writes))
    reads = mask_of(addresses)

    def slow(g: Group) -> None:
        if g.st.tainted & mask:
            if g.st.tainted & reads:
                g.require_written(addresses, "the address")
            lanes = None if g.full else g.mask
            for key in writes:
                old = g.taint(key) if half is not None else None
                keep = None if old is None else old & U32(0xFFFF if half else 0xFFFF0000)
                g.set_taint(key, keep, lanes)
        run(g)

    return slow


def track_store(
    run: Callable[..., None], addresses: tuple[int, ...], data: tuple[int, ...], words: int, half: int
) -> Run:
    """The tracking form of an LDS store: the address must be written, never-written data bits go to LDS with the
    data.
    """
    mask, sources = mask_of((*addresses, *data)), mask_of(data)

    def slow(g: Group) -> None:
        if not g.st.tainted & mask:
            run(g)
            return
        g.require_written(addresses, "the LDS address")
        taint = gather_taint(g, data, half) if g.st.tainted & sources else None
        run(g, taint)

    return slow


def gather_taint(g: Group, keys: tuple[int, ...], half: int) -> np.ndarray | None:
    """Never-written bits of the active lanes of some rows, uint32 [N, rows], or None when there are none."""
    columns: list[Any] = []
    for key in keys:
        bits = g.taint(key)
        bits = np.zeros((g.n, LANES), U32) if bits is None else np.broadcast_to(bits, (g.n, LANES))
        columns.append(bits.reshape(-1) if g.full else bits[g.active])
    taint = np.stack(columns, axis=1)
    if half:
        taint = taint >> U32(16)
    return taint if taint.any() else None
