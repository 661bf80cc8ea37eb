"""Triton versions against the float64 references, on the CPU with Triton's interpreter (a process of its own)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from dieplace.kernels.registry import op_names
from dieplace.kernels.triton import OPS

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed, so its kernels cannot be interpreted"
)
_RUN = """
import json, sys
from dieplace.kernels.check import check_op
limit = int(sys.argv[1]) or None
for op in sys.argv[2:]:
    result = check_op(op, "triton", limit=limit)
    print(json.dumps([op, result.cases, result.worst_ratio, [str(f) for f in result.failures]]), flush=True)
"""


def interpret(limit: int, *ops: str) -> list[list]:
    """Rows of (op, cases, worst deviation in tolerances, failures)."""
    # The interpreter must be chosen before the kernel modules are imported, hence the child.
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _RUN, str(limit), *ops]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_names_are_registry_names() -> None:
    assert set(OPS) <= set(op_names())


@needs_triton
def test_a_few_cases_of_every_op() -> None:
    rows = interpret(3, *OPS)
    assert [row[0] for row in rows] == list(OPS)
    assert all(row[1] == 3 for row in rows)
    assert [row for row in rows if row[3]] == []


@needs_triton
@pytest.mark.slow
def test_ten_cases_of_every_op() -> None:
    """All cases run on a device by `kernel check`; the interpreter takes minutes for them."""
    rows = interpret(10, *OPS)
    assert all(row[1] == 10 for row in rows)
    assert [row for row in rows if row[3]] == []
