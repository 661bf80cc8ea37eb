"""Triton's hand-offs: replayed as a graph would (Triton's interpreter), and as machine code for NVIDIA and AMD.

aiter PR 3928, DeepGEMM PR 451, torchcomms PR 1177: on replay a wait passed at once and read the last replay's data.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed, so its kernels can be neither interpreted nor compiled", allow_module_level=True
    )

SUPPORT = Path(__file__).parents[1] / "support"


def child(script: str, **environ: str) -> Any:
    # The interpreter is chosen before the kernel modules are imported, hence a process of its own for either.
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / script)],
        env={**kept, **environ}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return child("triton_handoffs.py", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled() -> Any:
    return child("triton_compiled.py")


def test_outputs_follow_the_input_of_each_replay(interpreted: Any) -> None:
    assert interpreted["replays"] == [[11.0, 11.0], [22.0, 22.0], [33.0, 33.0]]


def test_poison_between_replays_is_never_read(interpreted: Any) -> None:
    assert interpreted["poisoned"] == [[11.0, 11.0], [22.0, 22.0], [33.0, 33.0]]


def test_a_baked_in_value_is_caught_where_a_counted_one_waits(interpreted: Any) -> None:
    """The fault: with the tag baked in, the second replay takes the first one's words and nobody is told."""
    baked, counted = interpreted["baked"], interpreted["counted"]
    assert baked["out"] == 1.0 and baked["told"] is None and baked["status"] == [0, 0]
    assert counted["status"][0] == 300 and counted["record"] == [300, 65, 1, 0]
    assert "b, block 0, waited for mailbox of slot 0 [299] to hold 65" in counted["told"]
    assert "the last one held 1" in counted["told"]


def test_two_graphs_of_one_set_are_right_in_turn_and_refused_when_crossed(interpreted: Any) -> None:
    found = interpreted["two_graphs"]
    assert found["right"] == [11.0, 22.0, 22.0, 11.0]
    assert "waited for mailbox of slot 0" in found["crossed"] and "never did" in found["crossed"]
    assert found["after"] == 11.0  # usable again after a reset
    assert "a step of 1 hand-off" in found["single"]


def test_flags_are_counted_over_the_end_of_31_bits_and_tell_what_never_came(interpreted: Any) -> None:
    found = interpreted["flags"]
    assert found["values"] == [(0x7FFFFFFF - 63 + 9) & 0x7FFFFFFF, 9, 73]
    assert found["good"] == [0, 0] and found["rest"] == [3]
    # The counter is at 128: all five flags are behind, the last of them holds 73.
    assert found["status"] == [5, 73] and found["record"] == [5, 137, 73, 0]


def lines(text: str, pattern: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.search(pattern, line)]


def test_ptx_stores_and_polls_at_system_scope(compiled: Any) -> None:
    """PTX ISA, memory consistency model: ld.volatile is ld.relaxed with system scope (aiter PR 4786: device scope)."""
    code = compiled["sm_90"]
    assert lines(code["handoff_put"], r"st\.relaxed\.sys\.global\.u64")
    assert lines(code["flag_set"], r"st\.release\.sys\.global\.u32")
    assert lines(code["handoff_sum"], r"ld\.volatile\.global\.b64") and lines(
        code["flag_wait"], r"ld\.volatile\.global"
    )
    assert lines(code["flag_visibility"], r"st\.relaxed\.sys") and lines(
        code["flag_visibility"], r"ld\.volatile\.global"
    )
    assert not any(lines(text, r"\.(ld|st)\.[a-z.]*\.(cta|gpu)\b") for text in code.values())
    assert lines(code["flag_wait"], r"fence\.acq_rel\.sys")


def test_gfx950_stores_and_polls_at_system_scope(compiled: Any) -> None:
    """Polls are atomic: of a volatile load Triton 3.9 makes a buffer load without scope bits where it can."""
    code = compiled["gfx950"]
    assert all(re.search(r" sc0 sc1$", line) for line in lines(code["handoff_put"], r"global_store_dwordx2"))
    for name, add in (("handoff_sum", "global_atomic_add_x2"), ("flag_wait", "global_atomic_add ")):
        polls = lines(code[name], add)
        assert polls and all(re.search(r" sc0 sc1$", line) for line in polls[:1]), polls
    release = code["flag_set"]
    back, store = release.index("buffer_wbl2 sc0 sc1"), release.index("global_atomic_swap")
    assert back < store and "vmcnt(0)" in release[back:store]
    assert "buffer_inv sc0 sc1" in code["flag_wait"]


def test_the_counter_is_read_on_the_device(compiled: Any) -> None:
    """Each kernel that has a tag or value loads the counter: no launch argument alone decides what is waited for."""
    for name in ("handoff_put", "handoff_sum", "flag_set", "flag_wait"):
        assert lines(compiled["sm_90"][name], r"ld\.global\.b32"), name
