"""Reports of measured runs: what is drawn is what was taken, ceilings are measured, no name makes an element."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from html_page import Page, require_inside_frames

from dieplace.cli import main as frame
from dieplace.experiments import charts, charts_samples, generic_tables, live_tables, report
from dieplace.experiments.report_parts import md_text
from dieplace.experiments.run_shape import check_shape
from dieplace.run import Point, Quantity, Run

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2"
LINK, SWAP = FOLDER / "link" / "gpu0-gpu1.json", FOLDER / "weight-swap" / "gpu0-gpu1.json"
GIB = 1 << 30
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</SCRIPT><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def link() -> Run:
    return Run.load(LINK)


@pytest.fixture(scope="module")
def swap() -> Run:
    return Run.load(SWAP)


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]


def labelled(text: str, words: str) -> ElementTree.Element:
    (found,) = [svg for svg in drawings(text) if svg.attrib["aria-label"].startswith(words)]
    return found


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


def flags_run(points: int = 4, **facts: Any) -> Run:
    """A run of an experiment that nothing here knows, as an engineer of a later release might write it."""

    def quantity(value: float) -> Quantity:
        samples = tuple(value * (1 + 0.001 * (i % 5 - 2)) for i in range(20))
        return Quantity("ns", "measured", value, value * 0.999, value * 1.001, "median", samples)

    made = tuple(
        Point(
            f"{n} pollers",
            {"visibility_ns": quantity(900.0 + 100 * n), "time_over_one": Quantity("x", "measured", n, n, n, "pairs")},
            factors={"pollers": n, "home": "consumer" if n % 2 else "producer", "memory_class": "system"},
        )
        for n in range(1, points + 1)
    )
    return Run("polling", "gpu0-gpu1", "measured", "live", made, {"backend": "nvidia"}, {"name": "polling"},
               {"devices": [], "domains": []}, "2026-11-30", facts=facts)  # fmt: skip


def test_several_experiments_make_one_page_with_one_set_of_ceilings(link: Run, swap: Run) -> None:
    """The link run's highest cold rates, found here in its file, serve the roofline of weight-swap."""
    text = report.page([swap, link])
    page = Page(text)
    assert [t for t in page.texts["h2"] if ", measured" in t] == [
        "link, measured", "weight-swap, measured: gpt-oss-120b mxfp4, 1,024 tokens of context",
    ]  # fmt: skip
    points = json.loads(LINK.read_text())["points"]
    rates: dict[bool, float] = {}
    for point in points:
        if point["factors"]["cache"] == "cold" and point["factors"]["directions"] == "one":
            samples = point["quantities"].get("gb_per_s", {}).get("samples")
            if samples:
                near = point["arm"] in ("near", "near Tensor.copy_")
                rates[near] = max(rates.get(near, 0.0), statistics.median(samples))
    body = json.loads(SWAP.read_text())
    swapped = body["points"][1]
    floor_us = swapped["factors"]["moved_bytes_per_layer"] / rates[False] / 1000
    measured_us = statistics.median(swapped["quantities"]["layer_us"]["samples"])
    local_us = statistics.median(body["points"][0]["quantities"]["layer_us"]["samples"])
    shown = texts(labelled(text, "bytes over the ceiling"))
    assert f"{floor_us:.1f} of {measured_us:.1f} us, {floor_us / measured_us * 100:.0f} %" in shown
    local_floor = body["workload"]["bytes_per_layer"] / rates[True] / 1000
    assert f"{local_floor:.1f} of {local_us:.1f} us, {local_floor / local_us * 100:.0f} %" in shown
    assert "from the link run of this page" in text
    assert "from reads of this run" in report.page([swap])  # alone it has ceilings of its own


def test_without_a_measured_ceiling_there_is_no_percentage(swap: Run) -> None:
    """Case h13: never a share of a datasheet's figure."""
    blind = replace(swap, facts={k: v for k, v in swap.facts.items() if k != "prediction"})
    text = report.page([blind])
    assert "None here: bytes a step reads and a ceiling measured in the same run are not both known." in text
    assert not [svg for svg in drawings(text) if "ceiling" in svg.attrib["aria-label"]]


def test_every_sample_is_drawn_and_the_distribution_ends_at_one() -> None:
    values, again = (100.0, 101.0, 99.0, 140.0), (100.5, 99.5, 100.0, 101.0)
    svg = ElementTree.fromstring(
        charts_samples.samples([charts_samples.Sampled("arm", values, again, "100 us")], describe="d")
    )
    dots = list(svg.iter(f"{SVG}circle"))
    assert len(dots) == len(values) + len(again)
    filled = [dot for dot in dots if dot.attrib["fill"] != "none"]
    levels = [float(dot.attrib["cy"]) for dot in filled]
    order = sorted(range(4), key=lambda i: levels[i], reverse=True)
    assert order == sorted(range(4), key=lambda i: values[i])  # higher on the page is slower
    places = [float(dot.attrib["cx"]) for dot in filled]
    assert places == sorted(places)  # in order of taking
    middle = statistics.median(values)
    scale = (levels[0] - levels[3]) / ((values[3] - values[0]) / middle)
    assert (levels[0] - levels[1]) / ((values[1] - values[0]) / middle) == pytest.approx(scale, rel=0.1)
    stairs = [p.attrib["d"] for p in svg.iter(f"{SVG}path") if p.attrib.get("stroke-width") in ("1.8", "1.2")]
    heights = [[float(y) for y in re.findall(r"[ML]?[\d.]+ ([\d.]+)", path)] for path in stairs]
    for found in heights:  # eight corners a curve, from 0 up to 1 by one n-th each
        assert len(found) == 8 and found == sorted(found, reverse=True)
        assert found[0] - found[-1] == pytest.approx(charts_samples.ROW, abs=0.2)


def test_a_waterfall_ends_where_the_arm_ends(swap: Run) -> None:
    text = report.page([swap])
    shown = texts(labelled(text, "from local to swapped"))
    points = {point["arm"]: point for point in json.loads(SWAP.read_text())["points"]}
    local, swapped = ({stage["stage"]: stage["us"] for stage in points[arm]["stages"]} for arm in ("local", "swapped"))
    for stage, value in local.items():
        assert stage in shown and f"{round(swapped[stage] - value, 1) + 0.0:+.1f} us" in shown
    assert f"{sum(local.values()):.1f} us" in shown and f"{sum(swapped.values()):.1f} us" in shown
    svg = ElementTree.fromstring(
        charts.waterfall(
            charts.Step("a", 10), [charts.Step("up", 30), charts.Step("down", -5)], charts.Step("b", 35),
            unit="us", describe="d",
        )
    )  # fmt: skip
    boxes = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in svg.iter(f"{SVG}rect")]
    (a, up, down, b), zero = boxes, boxes[0][0]
    assert up[0] == pytest.approx(zero + a[1], abs=0.2) and up[1] == pytest.approx(3 * a[1], abs=0.3)
    assert down[0] + down[1] == pytest.approx(up[0] + up[1], abs=0.2) and down[0] == pytest.approx(zero + b[1], abs=0.2)


def test_pictures_show_the_two_gpus_with_their_bytes(swap: Run) -> None:
    text = report.page([swap])
    shown = texts(labelled(text, "bytes by home, swapped"))
    weights = json.loads(SWAP.read_text())["points"][1]["residency_before"]["bytes_by_role_and_domain"]["weights"]
    assert weights.keys() == {"gpu1/mem0"} and f"{weights['gpu1/mem0'] / 1e9:.2f} GB" in shown
    assert (
        shown.index("gpu0/mem0 H200") < shown.index("KV cache") < shown.index("gpu1/mem0 H200") < shown.index("weights")
    )
    assert "computes: gpu0/p0" in shown and not any("gpu1/p0" in words for words in shown)
    assert "swapped: what moves is probed, the rest accounted" in text


def test_conditions_stand_before_and_after(link: Run) -> None:
    page = Page(report.page([link]))
    cells = page.texts["td"]
    for when in ("before", "after"):
        gpus = json.loads(LINK.read_text())["facts"][f"telemetry_{when}"]["gpus"]
        assert cells.count(when) == len(gpus) == 2
        assert all(f"{gpu['power_w']:,.0f}" in cells for gpu in gpus)


def test_the_same_code_is_asked_of_the_arms_that_are_compared(swap: Run) -> None:
    """Each case has a graph of its own; within a case two hashes are the fault that the page must name."""
    points = tuple(
        replace(point, arm=f"{case} {point.arm}", factors={**point.factors, "case": case})
        for case in ("1K", "8K") for point in swap.points
    )  # fmt: skip
    hashes = {point.arm: f"of{point.factors['case']}" for point in points}
    several = replace(swap, points=points, facts={**swap.facts, "code_hash_by_arm": hashes})
    assert "the same in all arms of each case, 1K of1K, 8K of8K." in report.page([several])
    broken = replace(several, facts={**several.facts, "code_hash_by_arm": {**hashes, "8K swapped": "other"}})
    assert "Machine code: NOT the same in all arms" in report.page([broken])
    assert "Machine code: the same in all arms, hash" in report.page([swap])


def test_matrix_of_the_page_is_that_of_the_file(link: Run) -> None:
    shown = texts(labelled(report.page([link]), "Latency of dependent loads"))
    points = [p for p in json.loads(LINK.read_text())["points"] if p["factors"]["what"] == "latency"]
    for point in (p for p in points if p["factors"]["working_set_bytes"] == GIB):
        median = statistics.median(point["quantities"]["latency_ns"]["samples"])
        assert f"{median:,.0f} ns" in shown or f"{median:.1f} ns" in shown


def test_an_unknown_experiment_is_shown_and_not_refused() -> None:
    run = check_shape(flags_run(), "run.json")
    (table,) = live_tables.tables([run])
    assert generic_tables.main_quantity(run) == "visibility_ns"
    assert [row["factor_pollers"] for row in table.rows] == ["1", "2", "3", "4"]
    assert [row["factor_home"] for row in table.rows] == ["consumer", "producer", "consumer", "producer"]
    assert table.rows[1]["shown_visibility_ns"] == "1,100 [1,099, 1,101]" and table.unit == "ns"
    assert "memory class: system" in table.note  # the same in every point: told once
    page = Page(report.page([run]))
    assert [tag for tag, _ in page.seen].count("circle") == 4 * 20
    named = flags_run(headline="time_over_one")
    assert generic_tables.main_quantity(named) == "time_over_one"
    assert "1,100" in report.markdown_page([run])


def test_a_missing_value_is_told_with_its_reason() -> None:
    run = flags_run()
    lost = replace(run.points[0], quantities={"visibility_ns": Quantity("ns", "measured", None, why="no clock")})
    text = report.page([replace(run, points=(lost, *run.points[1:]))])
    assert "1 of 4 points: " in text and "(no clock)" in text


@pytest.mark.parametrize("hostile", [HOSTILE, "<!--", "</svg><b>", '"><svg/onload=1>', "](http://x) [a"])
def test_no_name_makes_an_element_in_a_measured_page(link: Run, swap: Run, hostile: str) -> None:
    """Case j9 for every new part: labels, arms, roles, homes, stages, notes, devices and conditions."""
    plain = Page(report.page([link, swap]))
    point = swap.points[1]
    evil = replace(
        point,
        arm=hostile,
        notes=(hostile,),
        stages=tuple({**stage, "stage": f"{stage['stage']}{hostile}"} for stage in point.stages),
        residency_before={
            "evidence": hostile, "moved_evidence": hostile,
            "bytes_by_role_and_domain": {hostile: {"gpu0/mem0": 10}, "weights": {hostile: 5}},
        },
    )  # fmt: skip
    facts = {**swap.facts, "stopped": hostile, "drift": {hostile: hostile}, "code_hash_by_arm": {"a": hostile}}
    runs = [
        replace(link, label=hostile, conditions={**link.conditions, "driver_version": hostile}),
        replace(swap, points=(swap.points[0], evil), notes=(hostile,), facts=facts),
    ]
    text = report.page(runs)
    page = Page(text)
    made, before = [tag for tag, _ in page.seen], [tag for tag, _ in plain.seen]
    for tag in ("img", "b", "script", "iframe"):
        assert made.count(tag) == before.count(tag)
    assert made.count("svg") <= before.count("svg")
    for tag, attributes in page.seen:
        assert not {"src", "href", "onload", "onerror"} & set(attributes), tag
    assert hostile in "".join(page.texts["p"]) and f"weight-swap: {hostile}" in page.texts["li"]
    assert "<" not in "".join(page.texts["script"])
    markdown = report.markdown_page(runs)
    assert "<" not in markdown.replace("&lt;", "") and "](" not in markdown.replace("\\](", "")


def test_text_stays_text_in_markdown() -> None:
    for text, wanted in (
        ("# title", "\\# title"), ("- item", "\\- item"), ("1. item", "1\\. item"), ("a | b", "a \\| b"),
        ("63.5 [63.3, 63.7]", "63.5 [63.3, 63.7]"), ("-0.5", "-0.5"), ("<b>", "&lt;b&gt;"), ("[a](b)", "\\[a\\](b)"),
        ("copy_ of _x_", "copy\\_ of \\_x\\_"), ("two\nlines", "two lines"),
    ):  # fmt: skip
        assert md_text(text) == wanted


def test_the_command_writes_markdown_of_several_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert frame.main(["bench", "report", str(LINK), str(SWAP), "--md"]) == 0
    assert capsys.readouterr().out == "report: report.md\n"
    text = Path("report.md").read_text(encoding="utf-8")
    body = json.loads(SWAP.read_text())
    for point in body["points"]:
        assert f"{statistics.median(point['quantities']['layer_us']['samples']):.1f} [" in text
    for title in ("Near and far memory, measured", "Bytes over the measured ceiling, measured", "Conditions"):
        assert title in text
    widths = {
        line.count(" | ") for block in text.split("\n\n") if block.startswith("|") for line in block.splitlines()[:1]
    }
    assert widths and all(
        len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
        for block in text.split("\n\n") if block.startswith("|")
    )  # fmt: skip
    assert frame.main(["bench", "show", str(LINK), str(SWAP)]) == 2
    assert "dieplace bench report" in capsys.readouterr().err


def test_the_slowest_are_drawn_and_looked_at_beside() -> None:
    """Case h15: 99 samples of 100 ns and one of 2,000: all drawn, medians with and without the slowest 1 %."""
    samples = (*(100.0 + 0.01 * (i % 7) for i in range(99)), 2000.0)
    run = flags_run()
    slow = Quantity("ns", "measured", statistics.median(samples), 100.0, 100.1, "median", samples)
    rate = Quantity("GB/s", "measured", 10.0, 9.9, 10.1, "median", (*(10.0,) * 99, 0.1))
    points = (replace(run.points[0], quantities={"visibility_ns": slow}), Point("rate", {"visibility_ns": rate}))
    text = report.page([replace(run, points=points)])
    assert text.count("<circle") == 200
    cells = Page(text).texts["td"]
    assert "2,000" in cells and "0.1" in cells  # the outliers themselves: the slowest time, the lowest rate
    trimmed = statistics.median(sorted(samples)[:-1])
    assert sum(cell.startswith(f"{trimmed:.1f} [") for cell in cells) >= 1
    assert "10.00 [10.00, 10.00]" in cells


def test_low_clocks_leave_the_table_whole_and_conclude_nothing(
    swap: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case h7 at the command: clocks at 59 % throughout: exit 0, every number shown, no verdict."""
    path = replace(swap, facts={**swap.facts, "clock_share": 0.59}).save(tmp_path / "run.json")
    assert frame.main(["bench", "show", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "swapped is too noisy to say, because clocks at 59 %" in out and "slower" not in out
    for point in swap.points:
        assert f" {point.quantities['layer_us'].value:.1f} " in out


def test_many_findings_are_folded_and_none_is_lost() -> None:
    text = report.page([flags_run(40)])
    said = [line for line in Page(text).texts["li"] if line.startswith("measured:")]
    assert len(said) == 40 and "26 more findings" in text


def test_every_chart_keeps_inside_its_frame(link: Run, swap: Run) -> None:
    """Long names, many arms and wild samples too."""
    long = "weights+kv+flags far in a mode with a long name, and on " * 2
    renamed = replace(
        swap,
        points=tuple(
            replace(p, arm=f"{long}{p.arm}", stages=tuple({**s, "stage": f"{s['stage']}{long}"} for s in p.stages))
            for p in swap.points
        ),
    )
    wild = Quantity("ns", "measured", 5.0, 1.0, 1e9, "median", (1e-3, 5.0, 1e9))
    odd = replace(flags_run().points[0], arm=long, quantities={"visibility_ns": wild})
    unknown = flags_run(40)
    pages = report.page([link, swap]) + report.page([link, renamed])
    assert require_inside_frames(pages + report.page([replace(unknown, points=(odd, *unknown.points))])) > 30
