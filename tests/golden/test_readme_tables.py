"""README and committed results agree: the tables between its markers are what the results give today."""

from __future__ import annotations

from pathlib import Path

import pytest

from dieplace.errors import UsageError
from dieplace.experiments.readme_tables import TABLES, filled, published_table, weight_swap_table

README = Path(__file__).resolve().parents[2] / "README.md"


def test_readme_holds_the_tables_of_the_results() -> None:
    if not README.exists():
        pytest.skip("this checkout has no README.md")
    page = README.read_text(encoding="utf-8")
    assert "<!-- table: weight-swap -->" in page and "<!-- table: published -->" in page
    assert filled(page) == page, "run: python -m dieplace.experiments.readme_tables README.md"


def test_a_stale_or_wrong_table_is_found() -> None:
    good = f"a\n<!-- table: weight-swap -->\n{weight_swap_table()}\n<!-- end table -->\nb\n"
    assert filled(good) == good
    stale = good.replace("679", "680")
    assert stale != good and filled(stale) == good
    with pytest.raises(UsageError, match="no table is called"):
        filled("<!-- table: colours -->\n<!-- end table -->")
    with pytest.raises(UsageError, match="no end"):
        filled("<!-- table: published -->\n")


def test_tables_say_modelled_and_hold_the_check_values() -> None:
    """Token times of sets A (B to C) are the reference's printed check values, rounded."""
    table = weight_swap_table()
    assert "| dpx-nps2 | local | 679 (650 to 722) | 0.0 | 0.0 |" in table
    assert "| dpx-nps2 | swapped | 869 (827 to 869) | 28.0 (14.6 to 28.0) | 14.6 |" in table
    assert "| spx-nps1 | local | 731 (700 to 770) | 7.7 (6.6 to 7.8) | 6.6 |" in table
    assert all("modelled" in make() for make in TABLES.values())
    assert len(published_table().splitlines()) == 2 + 19
