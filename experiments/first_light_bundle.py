"""The bundle of a first light: one folder with everything it saw, complete or not, that can be read anywhere.

bundle.json says how it stands and what is missing; answers.json holds the answers; tree/ a recording (or the machine)
in each state; runs/ the run files; report.html the page. Every file is replaced whole, so that whoever kills the
command leaves a bundle that reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.errors import UsageError
from dieplace.experiments.first_light_questions import ORIGINS, Answer, with_whys
from dieplace.whole_file import read_json, write_whole

if TYPE_CHECKING:
    from dieplace.run import Run

SCHEMA = "dieplace/first-light/1"
ANSWERS_SCHEMA = "dieplace/first-light-answers/1"
STATES = ("running", "complete", "interrupted", "not-restored")
EMULATED = (
    "an emulated node answered, experiments on private nodes of their own: it shows that the questions work and says"
    " nothing about any hardware"
)
NOT_MI355X = "two NVIDIA GPUs stood in for two dies: the answers are theirs and say nothing about an MI355X"
AS_FOUND = "as found"  # the one state of a node without partition modes
LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Outcome:
    """How an experiment went: `ran`, or one of the words of an answer, and why."""

    status: str
    why: str = ""
    runs: tuple[str, ...] = ()


@dataclass
class Bundle:
    """A bundle in its folder. `start` is the state that the node was found in; `planned` the states to be visited."""

    folder: Path
    backend: str
    origin: str
    started: str
    start: str = ""
    state: str = "running"
    ended: str | None = None
    parts: tuple[str, ...] = ()
    cards: int = 0
    planned: tuple[str, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    trees: dict[str, str] = field(default_factory=dict)
    experiments: dict[str, Outcome] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    restored: bool | None = None
    restored_said: str = "first light has not ended"
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    answers: dict[str, Answer] = field(default_factory=dict)

    def put(self, answer: Answer) -> None:
        """Keep one answer, on disk at once."""
        self.answers[answer.question] = answer
        self.missing = tuple(name for name in self.missing if name != answer.question)
        self.save()

    def save(self) -> None:
        """Write bundle.json and answers.json, each whole; UsageError where the folder cannot be written."""
        body = {"schema": ANSWERS_SCHEMA, "answers": [answer.to_json() for answer in self.answers.values()]}
        write_json(self.folder / "answers.json", body)
        write_json(self.folder / "bundle.json", self.to_json())

    def save_tree(self, state: str, tree: Mapping[str, Any]) -> None:
        """Keep the node as it reads in a state."""
        name = f"tree/{slug(state)}.json"
        write_json(self.folder / name, tree)
        self.trees[state] = name
        self.save()

    def run_files(self, experiment: str) -> list[Path]:
        """The run files of an experiment, in order of making."""
        found = self.experiments.get(experiment)
        return [self.folder / name for name in found.runs] if found else []

    def runs(self) -> dict[str, list[Run]]:
        """Every run by experiment; one that cannot be read is a UsageError."""
        from dieplace.run import Run

        return {name: [Run.load(path) for path in self.run_files(name)] for name in self.experiments}

    def to_json(self) -> dict[str, Any]:
        """bundle.json."""
        kept = ("backend", "origin", "started", "start", "state", "ended", "cards", "restored", "restored_said")
        whys = {
            "ended_why": "it has not ended", "restored_why": self.restored_said,
        }  # fmt: skip
        body = {name: getattr(self, name) for name in kept}
        return {
            "schema": SCHEMA,
            **body,
            **{key: why for key, why in whys.items() if body[key.removesuffix("_why")] is None},
            "parts": list(self.parts),
            "planned": list(self.planned),
            "versions": with_whys({key: value for key, value in self.versions.items() if value is not None}),
            "conditions": dict(self.conditions),
            "trees": dict(self.trees),
            "experiments": {name: asdict(outcome) for name, outcome in self.experiments.items()},
            "refused": dict(self.refused),
            "missing": list(self.missing),
            "notes": list(self.notes),
        }


def is_bundle(path: str | Path) -> bool:
    """Whether a folder holds a bundle."""
    return (Path(path) / "bundle.json").is_file()


def require_new(folder: Path) -> None:
    """UsageError where a bundle lies there already: what another machine or day answered is not written over."""
    if is_bundle(folder):
        raise UsageError(f"{folder} holds a first-light bundle already", hint="name another folder with --out")


def load(path: str | Path) -> Bundle:
    """Read a bundle, also an unfinished one; UsageError says what is wrong with it."""
    folder = Path(path)
    data = _read(folder / "bundle.json")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UsageError(f"{folder} holds no first-light bundle of this release (schema {SCHEMA})")
    try:
        outcomes = {str(name): _outcome(body) for name, body in data["experiments"].items()}
        trees = {str(state): _inside(name) for state, name in data["trees"].items()}
        bundle = Bundle(
            folder=folder,
            trees=trees,
            experiments=outcomes,
            **{name: _want(data[name], str, name) for name in ("backend", "origin", "started", "start", "state")},
            ended=None if data["ended"] is None else _want(data["ended"], str, "ended"),
            restored=None if data["restored"] is None else _want(data["restored"], bool, "restored"),
            restored_said=_want(data["restored_said"], str, "restored_said"),
            cards=_want(data["cards"], int, "cards"),
            versions=dict(data["versions"]),
            conditions=dict(data["conditions"]),
            refused={str(key): str(value) for key, value in data["refused"].items()},
            parts=_texts(data["parts"]),
            planned=_texts(data["planned"]),
            missing=_texts(data["missing"]),
            notes=_texts(data["notes"]),
        )
        answers = [Answer.from_json(one) for one in _answers(folder)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder} holds a damaged first-light bundle: {type(error).__name__} {error}") from error
    if bundle.state not in STATES or bundle.origin not in ORIGINS:
        raise UsageError(f"{folder} holds a damaged first-light bundle: {bundle.state!r}, {bundle.origin!r}")
    bundle.answers = {answer.question: answer for answer in answers}
    return bundle


def slug(text: str) -> str:
    """A state as a file name: `dpx-nps2`."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "state"


def write_json(path: Path, value: Any) -> None:
    """Replace a file by strict JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n", folders=True)


def _answers(folder: Path) -> list[Any]:
    if not (folder / "answers.json").exists():
        return []
    data = _read(folder / "answers.json")
    if not isinstance(data, dict) or data.get("schema") != ANSWERS_SCHEMA or not isinstance(data["answers"], list):
        raise ValueError("answers.json holds no answers")
    return list(data["answers"])


def _read(path: Path) -> Any:
    return read_json(path, most_bytes=LIMIT_BYTES, kind="bundle")


def _outcome(data: Any) -> Outcome:
    return Outcome(str(data["status"]), str(data["why"]), tuple(_inside(name) for name in data["runs"]))


def _inside(name: Any) -> str:
    """A path within the bundle: files of a bundle that was sent by somebody must not name others."""
    text = _want(name, str, "a file name")
    if not re.fullmatch(r"(tree|runs)/[A-Za-z0-9._-]+\.json", text):
        raise ValueError(f"{text!r:.60} is no file of a bundle")
    return str(text)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_want(item, str, "an item") for item in _want(value, list, "a list"))


def _want(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{what} is {type(value).__name__}, not {kind.__name__}")
    return value
