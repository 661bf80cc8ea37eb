"""The quick commands start quickly: at most 1.5 times two imports that a small command line tool cannot avoid."""

import pytest

from dieplace.experiments.start_up import LIMIT, measure


@pytest.mark.slow
def test_help_and_list_start_within_the_limit():
    assert LIMIT == 1.5
    found = measure(pairs=15)
    told = {name: f"{values['ratio']:.2f}" for name, values in found.items()}
    print(told)
    for name in ("--help", "list"):
        assert found[name]["ratio"] <= LIMIT, told
