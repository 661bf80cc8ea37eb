"""What a reader of a report relies on: nothing is cut off unseen, no words lack their chart, every line has its run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from html_page import Page

from dieplace.cli.main import main
from dieplace.experiments import first_light_report, live_tables, report, summary
from dieplace.experiments.charts_places import Held, Place, places
from dieplace.experiments.first_light_bundle import load
from dieplace.experiments.live_table import points_of
from dieplace.experiments.report_parts import Drawn, Folded, Heading, Said, to_markdown
from dieplace.experiments.report_style import STYLE
from dieplace.run import Point, Quantity, Run

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
MODELLED, MEASURED = RESULTS / "emulated-mi355x", RESULTS / "nvidia-h200-x2"
FOLDERS = [
    *(MODELLED / name for name in ("cache-type", "context", "flags", "mode", "placement", "verify", "weight-swap")),
    *(MEASURED / name for name in ("context", "flags", "link", "placement", "scale-out", "verify", "weight-swap")),
]
SVG = "{http://www.w3.org/2000/svg}"
EM = 0.6  # mean width of a character of DejaVu Sans over its size


def loaded(folder: Path) -> list[Run]:
    return [Run.load(path) for path in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f"{f.parent.name}-{f.name}")
def test_markdown_has_no_heading_above_nothing_and_no_words_of_a_chart(folder: Path) -> None:
    lines = [line for line in report.markdown_page(loaded(folder)).split("\n") if line.strip()]
    for line, after in zip(lines, [*lines[1:], "# the end"], strict=True):
        head, below = re.match(r"(#+) ", line), re.match(r"(#+) ", after)
        assert not (head and below and len(below[1]) <= len(head[1])), f"{line!r} stands above nothing"
        assert not re.search(r"the chart|the whisker|same as a table|drawn beside|\(red|^\*.*more arms", line), line


def test_a_heading_is_left_out_with_its_chart_and_one_above_a_kept_heading_stays() -> None:
    parts = [
        Heading("Empty", 2), Heading("also empty", 3), Drawn("<svg/>", caption="how to read it"),
        Heading("Kept", 2), Heading("of a chart", 3), Drawn("<svg/>"), Heading("of a number", 3), Said("42"),
        Folded("more arms", (Heading("folded chart", 3), Drawn("<svg/>"))), Heading("Last", 2),
    ]  # fmt: skip
    assert to_markdown(parts).split("\n\n") == ["## Kept", "### of a number", "42"]


class _Framed(Page):
    """Elements that may be wider than the page, with whether a scrolling box is around them."""

    def __init__(self, text: str) -> None:
        self.divs: list[str] = []
        self.found: list[tuple[str, bool]] = []
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("svg", "table"):
            self.found.append((tag, any("wide" in classes.split() for classes in self.divs)))
        if tag == "div":
            self.divs.append(dict(attrs).get("class") or "")
        super().handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self.divs.pop()
        super().handle_endtag(tag)


def test_every_table_and_chart_scrolls_in_a_box_that_says_so() -> None:
    pages = [report.page(loaded(MEASURED / "flags")), report.page(loaded(MODELLED / "verify"))]
    pages += [first_light_report.page(load(folder / "first-light")) for folder in (MODELLED, MEASURED)]
    for text in pages:
        found = _Framed(text).found
        assert len(found) > 2 and all(framed for _, framed in found)
        style = text[text.index("<style>") : text.index("</style>")]
        assert re.search(r"\.wide \{[^}]*overflow-x: auto", style) and "scroll sideways" in style
        assert "scroll-state(scrollable: x)" in style
    assert STYLE.count("{") == STYLE.count("}")


def _ranks(block: str, count: int = 4) -> Run:
    """A merged modelled run of several ranks, each with its own card and one place of memory a card."""
    cards = [{"id": f"gpu{n}", "part": "MI355X"} for n in range(count)]
    devices = [{"id": f"gpu{n}/p{p}", "domain": f"gpu{n}/mem0"} for n in range(count) for p in (0, 1)]
    domains = [{"id": f"gpu{n}/mem0", "card": f"gpu{n}"} for n in range(count)]
    ranks = [
        {"rank": n, "host": "host0", "cards": [f"gpu{n}"], "bdfs": ["0"], "parts": ["MI355X"], "state": "measured",
         "exit_code": 0}
        for n in range(count)
    ]  # fmt: skip
    x = Quantity("x", "modelled", 1.0, method="ratio")
    points = tuple(
        Point(
            "local",
            {
                "token_us": Quantity("us", "modelled", 700.0),
                "over_all_cards": x,
                "modified_z_score": replace(x, unit=""),
            },
            factors={"rank": n, "host": "host0", "card": f"gpu{n}", "outlier": "no"},
            residency_before={"evidence": "accounted", "bytes_by_role_and_domain": {"weights": {f"gpu{n}/mem0": 2816}}},
        )
        for n in range(count)
    )
    facts: dict[str, Any] = {"ranks": ranks, "world_size": count, "experiment": "weight-swap"}
    return Run("scale-out", block, "modelled", "emulated", points, {}, {"name": "weight-swap"},
               {"devices": devices, "domains": domains, "cards": cards}, "2026-11-30", facts=facts)  # fmt: skip


def test_rows_verdicts_and_pictures_of_ranks_say_whose_they_are() -> None:
    runs = [_ranks("dpx-nps1"), _ranks("spx-nps1")]
    said = live_tables.sentences(runs)
    assert len(set(said)) == 2 and [line.split(": ")[1] for line in said] == ["dpx-nps1", "spx-nps1"]
    ranks, spread = live_tables.tables(runs)
    assert ranks.note == ""  # no clock, power or temperature was read
    shown = [tuple(row[key] for key, _, _ in spread.columns) for row in spread.rows]
    assert len(set(shown)) == len(shown) == 2 and "dpx-nps1" in shown[0]
    titles = [title for title in Page(report.page(runs)).texts["h3"] if "accounted" in title]
    assert len(set(titles)) == len(titles) == 8 and titles[1] == "dpx-nps1 local, rank 1 on host0 gpu1: accounted"
    drawn = re.findall(r'<svg[^>]*aria-label="bytes by home.*?</svg>', report.page(runs), flags=re.DOTALL)
    assert len(drawn) == 8 and all("nothing in" not in svg and len(re.findall("gpu./mem0", svg)) == 1 for svg in drawn)
    assert "2.82 kB" in report.markdown_page(runs)


@pytest.mark.parametrize("readers", ["gpu0/p0", "gpu0/p0, gpu0/p1", ", ".join(f"gpu0/p{n}" for n in range(8))])
def test_no_words_of_a_picture_of_places_lie_over_others(readers: str) -> None:
    place = Place("gpu0/mem0 MI355X", f"computes: {readers}", (Held("weights", "", "62.91 GB"),))
    svg = ElementTree.fromstring(places([place, place], link="", describe="two"))
    boxes = []
    for one in svg.iter(f"{SVG}text"):
        width, x, y = EM * float(one.attrib["font-size"]) * len(one.text or ""), *(float(one.attrib[k]) for k in "xy")
        boxes.append((x - width if one.attrib["text-anchor"] == "end" else x, width, y, one.text))
    for n, (left, width, y, words) in enumerate(boxes):
        for other, _, other_y, over in boxes[n + 1 :]:
            apart = other >= left + width or left >= other + EM * 13 * len(over or "")
            assert abs(y - other_y) >= 10 or apart, f"{words} under {over}"
    assert "..." not in "".join(str(words) for *_, words in boxes)


def test_a_note_that_not_all_runs_hold_names_those_that_do() -> None:
    swaps, (flags,) = loaded(MEASURED / "weight-swap"), loaded(MEASURED / "flags")
    one, two = swaps
    runs = [replace(one, notes=("all", "one computes")), replace(two, notes=("all", "both compute", "swapped")),
            replace(flags, notes=("all", "polls"))]  # fmt: skip
    runs[0] = replace(runs[0], notes=(*runs[0].notes, "swapped"))
    assert summary.notes(runs) == [
        "all", f"weight-swap {one.block}: one computes", "weight-swap: swapped",
        f"weight-swap {two.block}: both compute", "flags: polls",
    ]  # fmt: skip
    assert summary.notes(runs[:2])[1] == f"{one.block}: one computes"
    assert summary.notes(runs[:1]) == list(runs[0].notes)
    assert f"weight-swap {two.block}: both compute" in Page(report.page(runs)).texts["li"]


def test_small_bytes_have_a_unit_that_fits() -> None:
    for folder in (MODELLED / "flags", MEASURED / "flags", MEASURED / "placement"):
        runs = loaded(folder)
        audited = [(point.residency_before or {})["bytes_by_role_and_domain"] for _, point in points_of(runs)]
        flags = min(nbytes for by_role in audited for nbytes in by_role["sync_flag"].values())
        table = next(t for t in live_tables.tables(runs) if "Bytes by role" in t.title)
        text = [str(row["size"]) for row in table.rows]
        assert not any(re.match(r"0(\.0+)? [kMG]B", size) for size in text)
        assert flags >= 1000 or f"{flags} B" in text


def test_points_without_a_value_are_told_below_the_table_and_stay_in_its_json() -> None:
    (run,) = loaded(MODELLED / "flags")
    known = [p.arm for p in run.points if any(q.value is not None for q in p.quantities.values())]
    table = live_tables.tables([run])[0]
    assert [row["arm"] for row in table.shown_rows] == known and len(table.rows) == len(run.points) > len(known)
    assert f"{len(run.points) - len(known)} of {len(run.points)} points" in table.note
    assert all(point.arm in table.note for point in run.points if point.arm not in known)


def test_a_folder_of_two_experiments_says_what_each_file_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("flags", "cache-type"):
        (tmp_path / f"{name}.json").write_bytes((MODELLED / name / "dpx-nps2.json").read_bytes())
    assert main(["bench", "show", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    for name in ("flags", "cache-type"):
        (line,) = [one for one in told.split("\n") if f"bench show {tmp_path}/{name}.json" in one]
        assert f"({name}/dpx-nps2: " in line
        assert main(line.split("  (")[0].split()[1:]) == 0
