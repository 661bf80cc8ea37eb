"""How a first light ends: the questions that all it saw answers, what is left open and why, the marker, the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dieplace.experiments import first_light_marker as markers
from dieplace.experiments import first_light_report
from dieplace.experiments.first_light_bundle import Bundle, Outcome
from dieplace.experiments.first_light_catalogue import QUESTIONS
from dieplace.experiments.first_light_drive import EXPERIMENTS, Drive
from dieplace.experiments.first_light_questions import safely, without
from dieplace.experiments.first_light_runs import Ran

if TYPE_CHECKING:
    from dieplace.experiments.first_light_marker import Marker
    from dieplace.experiments.first_light_preflight import Preflight
    from dieplace.experiments.first_light_seen import Seen
    from dieplace.partition.facts import NodeFacts
    from dieplace.partition.journal import Journal


@dataclass(frozen=True)
class EndScene:
    """What the questions of the end are asked of."""

    seen: Seen
    ran: Ran
    ids: dict[str, dict[str, str | None]]
    marker: Marker | None
    facts: NodeFacts | None
    journal: Journal | None


def close(drive: Drive, found: Preflight, state: str) -> None:
    """Answer what follows from everything, close the bundle and write its page."""
    bundle, control = drive.bundle, drive.host.control
    if drive.observations or control is None:
        ran = Ran(drive.host.origin, bundle.runs(), _whys(bundle), drive.host.backend != "nvidia")
        facts = drive.observations[0].facts if drive.observations else None
        scene = EndScene(drive.seen(), ran, drive.ids, found.marker, facts, found.earlier)
        for question in QUESTIONS:
            if question.place == "end" and question.id not in bundle.answers and state != "interrupted":
                drive.keep(safely(question, scene, drive.host.origin), None)
    if state == "complete":
        _close_open_questions(drive)
    bundle.state, bundle.ended = state, markers.now()
    if control is not None and drive.marker is not None:
        left = {} if bundle.restored else dict(drive.marker.put_back)
        markers.write(control, markers.marker_of(control.read(), running=not bundle.restored, put_back=left))
    bundle.save()
    first_light_report.write(bundle)


def _close_open_questions(drive: Drive) -> None:
    seen = drive.seen()
    for question in QUESTIONS:
        if question.id not in drive.bundle.answers:
            why = seen.why_not("no state was seen in which a device has one peer")
            drive.keep(without("not-asked", question.id, why, origin=drive.host.origin), None)
    for name in EXPERIMENTS:
        if name not in drive.bundle.experiments:
            drive.bundle.experiments[name] = Outcome("not-asked", seen.why_not("it needs a state with a peer"))
    drive.bundle.missing = ()


def _whys(bundle: Bundle) -> dict[str, str]:
    return {name: outcome.why for name, outcome in bundle.experiments.items() if outcome.why}
