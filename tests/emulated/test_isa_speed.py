"""The interpreter's own benchmark runs, checks its result, and is not slower by orders of magnitude."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_benchmark_checks_its_answer_and_reports_a_speed() -> None:
    from dieplace.experiments.interpreter_speed import main

    rows = main(["--waves", "256", "1024", "--repeat", "3"])
    assert [row["waves"] for row in rows] == [256, 1024]
    # far below what an idle core does (5 M/s and more), far above an interpreter that runs waves one by one (0.1 M/s)
    assert min(row["here_m_wave_instructions_per_s"] for row in rows) > 0.4
