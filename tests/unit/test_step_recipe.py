"""The measured step's hand-offs: where they stand, that replays wait for their own values, what a lost flag says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dieplace.experiments.step_recipe import experts_chosen, with_handoffs

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed, so its kernels cannot be interpreted"
)
# Three replays of two layers on the CPU, then one in which the first flag is never set.
_CHILD = """
import json, torch
from dieplace.errors import KernelFault
from dieplace.experiments import step_recipe
from dieplace.experiments.layer_speed import Layer

plain = step_recipe.Recipe(
    lambda n: Layer({"x": torch.zeros(1)}), lambda: {"y": torch.zeros(1)},
    lambda one, work: [("o_proj", int), ("down", int)],
)
recipe = step_recipe.recipe_with_handoffs(plain)
layers, work = [recipe.layer(n) for n in range(2)], recipe.workspace()
stages = [recipe.stages(one, work) for one in layers]
closing = recipe.closing(work)
seen = []
for _ in range(3):
    for one in stages:
        step_recipe.together(one)()
    step_recipe.together(closing)()
    recipe.check(work)
    seen.append([[int(v) for v in one.t["flags"][:, 0]] for one in layers] + [int(work["epoch"][0])])
step_recipe.SPIN_LIMIT = 50
stages = [recipe.stages(one, work) for one in layers]
step_recipe.together([s for s in stages[0] if s[0] != "flag_set"])()
try:
    recipe.check(work)
    told = ""
except KernelFault as error:
    told = str(error)
print(json.dumps({"names": [name for name, _ in stages[0]], "seen": seen, "told": told}))
"""


@pytest.fixture(scope="module")
def child() -> dict[str, Any]:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _CHILD]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_triton
def test_every_replay_writes_and_awaits_its_own_values(child: dict[str, Any]) -> None:
    """Case g3's fault, a value baked into the graph, would show the same numbers three times."""
    assert child["names"] == ["o_proj", "flag_set", "flag_wait", "down", "flag_set", "flag_wait"]
    assert child["seen"] == [[[64 * n + 1, 64 * n + 2]] * 2 + [64 * (n + 1)] for n in range(3)]


@needs_triton
def test_a_flag_that_is_never_set_is_told_with_what_was_expected(child: dict[str, Any]) -> None:
    assert "a layer's hand-off" in child["told"] and "to hold 193" in child["told"] and "held 129" in child["told"]


def test_a_layer_without_such_a_stage_meets_in_its_middle() -> None:
    stages = [(name, int) for name in "abcd"]
    meetings = [[("first", int)], [("second", int)]]
    assert [name for name, _ in with_handoffs(stages, meetings)] == ["a", "b", "c", "first", "d", "second"]


def test_experts_of_a_round_are_counted_once() -> None:
    torch = pytest.importorskip("torch")
    assert experts_chosen(torch.tensor([[1, 2, 3, 4], [4, 3, 2, 9]])) == 5
