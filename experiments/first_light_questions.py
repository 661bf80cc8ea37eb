"""What a question of first light is, and what an answer to one looks like: plain data, and nothing that asks.

An answer is one of four kinds. `answered`: the host showed it. `unknown`: it was asked and could not be told, with why.
`refused`: the host did not let it be asked. `not-asked`: asking has no sense or no leave here. None is ever left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dieplace.errors import DieplaceError, UsageError

STATUSES = ("answered", "unknown", "refused", "not-asked")
ORIGINS = ("measured", "reported", "emulated")
PLACES = ("node", "devices", "end")


class NotAsked(Exception):
    """Raised by a question that has no sense here; the text is the reason, as a sentence without its full stop."""


@dataclass(frozen=True)
class Answer:
    """One answer: `word` is one of the question's own (None unless answered), `said` the whole in one sentence.

    `value` is plain data: numbers carry their unit in the key, unknown ones are None with a `..._why`. `evidence` are
    lines of what was seen. `mode` is the mode that it was asked in.
    """

    question: str
    status: str
    said: str
    origin: str
    word: str | None = None
    value: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES or self.origin not in ORIGINS:
            raise ValueError(f"{self.question}: {self.status!r} of origin {self.origin!r} is no answer")
        if (self.word is not None) != (self.status == "answered"):
            raise ValueError(f"{self.question}: an answer has a word, and only an answer has one")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "question": self.question,
            "status": self.status,
            "word": self.word,
            **({} if self.word is not None else {"word_why": self.said}),
            "said": self.said,
            "origin": self.origin,
            "value": dict(self.value),
            "evidence": list(self.evidence),
            "mode": self.mode,
            **({} if self.mode is not None else {"mode_why": "it does not belong to one mode"}),
        }

    @classmethod
    def from_json(cls, data: Any) -> Answer:
        """The inverse; UsageError for anything else."""
        try:
            evidence = tuple(str(line) for line in data["evidence"])
            texts = {key: _text(data[key]) for key in ("question", "status", "said", "origin")}
            word, mode = (None if data[key] is None else _text(data[key]) for key in ("word", "mode"))
            return cls(**texts, word=word, value=dict(data["value"]), evidence=evidence, mode=mode)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not an answer of first light: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class Question:
    """One question: who asks (`place`), how, why it matters, and which words can answer it.

    `place`: `node` is asked by the process that switches modes and opens no device; `devices` in a process of its own,
    which opens the runtime; `end` is told from all that was seen.
    `needs_peer`: it is asked where a device has exactly one peer, which on an MI355X is DPX/NPS2.
    """

    id: str
    text: str
    how: str
    why: str
    words: tuple[str, ...]
    place: str
    ask: Callable[[Any], Answer]
    backends: tuple[str, ...] = ("amd", "emulated")
    needs_peer: bool = False
    elsewhere: str = ""  # why it is not asked on other backends, where the host's own reason does not fit

    def __post_init__(self) -> None:
        if self.place not in PLACES or not self.words:
            raise ValueError(f"{self.id}: asked at {self.place!r}, words {self.words}")

    @property
    def source(self) -> str:
        """Where it is written down, with what public documents say of it."""
        return f"docs/first-light.md#{self.id}"


def answered(question: str, word: str, said: str, *, origin: str, value: Any = None, evidence: Any = ()) -> Answer:
    """The host showed it."""
    return Answer(question, "answered", said, origin, word, with_whys(value or {}), tuple(evidence))


def without(status: str, question: str, why: str, *, origin: str, value: Any = None, evidence: Any = ()) -> Answer:
    """`unknown`, `refused` or `not-asked`, and why."""
    return Answer(question, status, why, origin, None, with_whys(value or {}), tuple(evidence))


def safely(question: Question, scene: Any, origin: str) -> Answer:
    """Ask; whatever goes wrong becomes an answer. Ctrl-C passes."""
    try:
        found = question.ask(scene)
    except NotAsked as reason:
        return without("not-asked", question.id, str(reason), origin=origin)
    except DieplaceError as error:
        evidence = [f"{key}: {value}" for key, value in error.facts.items()][:8]
        return without("refused", question.id, str(error), origin=origin, evidence=evidence)
    except Exception as error:  # a vendor's library may raise anything, and the next question must still be asked
        return without("unknown", question.id, f"asking failed: {type(error).__name__}: {error}", origin=origin)
    if found.question != question.id or (found.word is not None and found.word not in question.words):
        raise ValueError(f"{question.id} was answered by {found.question} with {found.word!r}")
    return found


def with_whys(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value with a why beside each unknown or not finite number."""
    body: dict[str, Any] = {}
    for key, item in value.items():
        lost = isinstance(item, float) and not math.isfinite(item)
        body[key] = None if lost else item
        if (item is None or lost) and f"{key}_why" not in value:
            body[f"{key}_why"] = "not seen" if item is None else f"not a finite number ({item})"
    return body


def timed_word(origin: str) -> str:
    """The word of an answer that is a time or rate: what it is, so that an emulated one is never called measured."""
    return "emulated" if origin == "emulated" else "measured"


def gb(nbytes: float) -> str:
    """Bytes as a sentence tells them, in decimal GB; the exact number stands in the answer's value."""
    return f"{nbytes / 1e9:,.2f} GB"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value
