"""The report page: complete, self-contained, escaped, and saying *modelled* wherever it shows modelled numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from html_page import Page, require_inside_frames

from dieplace.errors import UsageError
from dieplace.experiments import charts, report
from dieplace.experiments.published import rows
from dieplace.run import Run

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "results" / "emulated-mi355x" / "weight-swap"


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [Run.load(FOLDER / f"{block}.json") for block in ("dpx-nps2", "spx-nps1", "dpx-nps1")]


def test_page_is_whole_and_self_contained(runs: list[Run]) -> None:
    text = report.page(runs)
    page = Page(text)
    # times, causes, stages, a waterfall for each of the three arms that add something, four cards, published figures
    assert [tag for tag, _ in page.seen].count("svg") == 11
    for tag, attributes in page.seen:
        assert tag not in ("img", "link", "iframe", "object", "form")
        assert not {"src", "href", "onload", "onerror", "onclick"} & set(attributes)
        if tag == "script":
            assert attributes["type"] == "application/json"
    assert "url(" not in text and "@import" not in text


def test_every_title_of_modelled_numbers_says_modelled(runs: list[Run]) -> None:
    page = Page(report.page(runs))
    told = {"Parameter sets of the model", "Conditions", "The runs themselves"}
    for title in [*page.texts["h1"], *page.texts["h2"]]:
        assert "modelled" in title or title in told or title.startswith("Bytes by role and die, from the audit")
    assert "modelled" in page.texts["title"][0]


def test_embedded_runs_are_the_runs(runs: list[Run]) -> None:
    page = Page(report.page(runs))
    data = json.loads("".join(page.texts["script"]))
    assert [Run.from_json(one) for one in data] == runs


@pytest.mark.parametrize(
    "label",
    ["</SCRIPT><img src=x onerror=alert(1)>", "</script ><b>", "<!--", "<!--<script>", "]]>&lt;", '"><svg/onload=1>'],
)
def test_a_label_is_text_and_never_an_element(runs: list[Run], label: str) -> None:
    """Case j9: no spelling of an end tag or comment may end the embedded data or make an element."""
    plain = Page(report.page(runs))
    page = Page(report.page([replace(run, label=label, notes=(*run.notes, label)) for run in runs]))
    made = [tag for tag, _ in page.seen]
    assert made.count("img") == made.count("b") - [t for t, _ in plain.seen].count("b") == 0
    assert made.count("script") == 1 and made.count("svg") == [t for t, _ in plain.seen].count("svg")
    assert label in page.texts["p"] and label in page.texts["li"]
    assert "<" not in "".join(page.texts["script"])
    assert json.loads("".join(page.texts["script"]))[0]["label"] == label


def test_charts_are_well_formed_and_keep_inside_their_frame(runs: list[Run]) -> None:
    long = "weights+kv+flags far in a mode with a long name, and on " * 2
    renamed = [replace(run, points=tuple(replace(p, arm=f"{long}{p.arm}") for p in run.points)) for run in runs]
    pages = report.page(runs) + report.page(renamed[:1])
    assert require_inside_frames(pages) > 10


def test_bars_are_drawn_to_scale() -> None:
    svg = ElementTree.fromstring(charts.bars([charts.Bar("a", 100.0), charts.Bar("b", 50.0)], unit="us", describe="d"))
    widths = [float(r.attrib["width"]) for r in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)


def test_every_published_figure_has_a_row(runs: list[Run]) -> None:
    """The figures of the article's residency section, each as it is printed there."""
    text = Page(report.page(runs))
    cells = " | ".join(text.texts["td"])
    for figure in (
        *("about half", "7.5 to 8 %", "16 to 20 %", "28 %", "1.4 us", "86 %", "14 %", "25 %", "17 %", "11 %", "4 %"),
        *("11.7", "about 7", "1.36x", "1.08x", "1.27x", "two", "half"),
    ):
        assert figure in cells
    found = {row.claim: row for row in rows(runs)}
    assert len(found) == 23
    for row in found.values():
        assert row.reason
        body = row.to_json()
        assert (body["residual"] is None) == ("residual_why" in body)


def test_what_speculation_would_have_to_give_is_what_the_reference_says(runs: list[Run]) -> None:
    """1.27x needs 1.71 and 2.39 accepted tokens a round of 2 and 4 there, over its sets; ours is of set A alone."""
    reason = next(row.reason for row in rows(runs) if row.claim == "GSM8K: speculation alone")
    two, four = (float(number) for number in re.findall(r"([\d.]+) of [24]", reason))
    assert two == pytest.approx(1.71, rel=0.02) and four == pytest.approx(2.39, rel=0.02)


def test_residuals_are_against_the_nearest_end(runs: list[Run]) -> None:
    found = {row.claim: row for row in rows(runs)}
    assert found["placement alone"].residual == 0.0  # 7.68 lies between 7.5 and 8
    assert found["expert weight streaming, local"].residual == pytest.approx(2.50 - 4, abs=0.005)
    assert found["weights moved to the other die"].residual == pytest.approx(0.0, abs=0.005)
    assert found["with speculation on top"].modelled is None


def test_other_workloads_get_the_reason_instead_of_the_table(runs: list[Run]) -> None:
    other = [replace(run, workload={**run.workload, "context_tokens": 8192}) for run in runs]
    text = report.page(other)
    assert "the published figures are for gpt-oss-120b" in text and "7.5 to 8 %" not in text


def test_the_link_is_said_to_carry_what_its_bytes_come_from(runs: list[Run]) -> None:
    assert "from shapes and audit" in report.page(runs) and "ISA" not in report.page(runs[:1])
    counted = report.page([replace(run, code_hash="0" * 12) for run in runs])
    assert "from ISA counts and audit" in counted and "from shapes and audit" not in counted


def test_only_what_the_audit_counted_is_said_to_be_audited(runs: list[Run]) -> None:
    found = {row.claim: row.modelled.method for row in rows(runs) if row.modelled is not None}
    assert {claim for claim, method in found.items() if "audit" in method} == {
        "default mode: reads that cross the die-to-die link",
        "DPX/NPS2: weights, KV cache, sync flags on the local die",
    }


def test_runs_that_do_not_belong_together_are_refused(runs: list[Run]) -> None:
    """No page mixes origins; one set of tables mixes neither experiments nor workloads either."""
    with pytest.raises(UsageError, match="one report cannot hold runs of different origin"):
        report.page([runs[0], replace(runs[1], origin="measured")])
    for changed in (
        replace(runs[1], workload={**runs[1].workload, "name": "other"}),
        replace(runs[1], workload={**runs[1].workload, "bytes_from": "counted on the emulator, code 0"}),
        replace(runs[1], experiment="placement"),
    ):
        with pytest.raises(UsageError, match="one set of tables cannot hold"):
            report.check_together([runs[0], changed])
        page = Page(report.page([runs[0], changed]))  # a page of two parts
        assert len(page.texts["h2"]) == 3
    with pytest.raises(UsageError, match="no run"):
        report.page([])


def test_a_block_or_arm_that_is_missing_leaves_its_rows_empty(runs: list[Run]) -> None:
    for some in (runs[:1], runs[1:2], [replace(runs[0], points=runs[0].points[1:])]):
        assert "7.5 to 8 %" in report.page(some)
        found = {row.claim: row for row in rows(some)}
        assert (found["placement alone"].modelled is None) == (some[0].block != "spx-nps1")
        assert found["with speculation on top"].residual is None


def test_counted_rows_hold_by_construction(runs: list[Run]) -> None:
    """Two dies with half of the HBM each, two devices, all of it local: the emulated node must not say otherwise."""
    found = {row.claim: row for row in rows(runs)}
    for claim, value in (
        ("HBM on each of the two dies", 50.0),
        ("default mode: reads that cross the die-to-die link", 50.0),
        ("DPX/NPS2: logical devices per card", 2.0),
        ("DPX/NPS2: weights, KV cache, sync flags on the local die", 100.0),
    ):
        modelled = found[claim].modelled
        assert modelled is not None and modelled.value == pytest.approx(value, abs=1e-9)
