"""Distinct bytes of operands that a call reads only in part: chosen experts, visible positions, appended rows."""

from __future__ import annotations

from dieplace.kernels.reference_attention import visible
from dieplace.kernels.registry import Call


def experts(call: Call) -> dict[str, int]:
    """Blocks, scales and biases of the distinct experts that the ids name."""
    ids = call.operands["ids"]
    assert ids is not None
    distinct = len(set(ids.flatten().tolist()))
    counted = {}
    for name in ("blocks", "scales", "bias"):
        tensor = call.operands[name]
        if tensor is not None:
            counted[name] = distinct * tensor[0].numel() * tensor.element_size()
    return counted


def attention_split(call: Call) -> dict[str, int]:
    """Rows of K and V that at least one token sees."""
    lengths, cache = call.operands["lengths"], call.operands["k_cache"]
    assert lengths is not None and cache is not None
    seen = {j for length in lengths.tolist() for j in visible(length, call.attrs["window"])}
    nbytes = len(seen) * cache[0, 0].numel() * cache.element_size()
    return {"k_cache": nbytes, "v_cache": nbytes}


def rope_kv_append(call: Call) -> dict[str, int]:
    """Rows of K and V that are written, and the table rows of the positions."""
    slots, cache = call.operands["slots"], call.operands["k_cache"]
    table, positions = call.operands["cos"], call.operands["positions"]
    assert slots is not None and cache is not None and table is not None and positions is not None
    rows = len({slot for slot in slots.tolist() if slot >= 0}) * cache[0].numel() * cache.element_size()
    turns = len(set(positions.tolist())) * table[0].numel() * table.element_size()
    return {"k_cache": rows, "v_cache": rows, "cos": turns, "sin": turns}
