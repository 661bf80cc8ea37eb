"""What experiments there are: a name, its factors, where it can run, and the function that runs it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.run import Run

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Watch:
    """How the caller of a live run follows it: where unfinished work is kept (None: nowhere), who hears of blocks."""

    folder: Path | None = None
    tell: Progress = lambda text: None


@dataclass(frozen=True)
class Options:
    """What a caller chooses; an experiment refuses what it has no use for.

    `arms` empty means the experiment's own default. `shards`: 2 is tensor-parallel halves on both dies. `bytes_from`:
    `shapes` computes what a step reads from the model's sizes, `counted` counts it by running the FlyDSL kernels' ISA
    on the emulator. `allow_unvalidated`: blocks may be in modes that AMD does not list. `consent`: the person at the
    command agreed to the switches that `Experiment.switches` told of. `card` of a node of `cards`: which one a modelled
    experiment takes; on devices it takes those that the process sees.
    """

    model: str = "gpt-oss-120b"
    precision: str = "mxfp4"
    context_tokens: int = 1024
    shards: int = 2
    arms: tuple[str, ...] = ()
    label: str = ""
    bytes_from: str = "shapes"
    allow_unvalidated: bool = False
    consent: bool = False
    card: str = "gpu0"
    cards: int = 1
    watch: Watch = field(default=Watch(), compare=False, repr=False)

    def __post_init__(self) -> None:
        twice = next((arm for index, arm in enumerate(self.arms) if arm in self.arms[:index]), None)
        if twice is not None:
            raise UsageError(f"arm {twice!r} is named twice", hint="name each arm once")


@dataclass(frozen=True)
class Experiment:
    """One ablation. `cannot(backend)` is None where it can run, else one sentence why not.

    `run(backend, options, progress)` gives one Run a block as each is done. `steps` is how often it calls progress,
    `live_steps` where it runs on devices, `steps_asked(backend, options)` where that depends on what is asked;
    counting bytes on the emulator calls it more often, for each stage that it runs. `switches(backend, options)` gives
    the lines of the partition plans that it would carry out on the real node: to be shown and agreed to before.
    `cards_a_rank` says on which backends a rank under torchrun takes more than one card.
    """

    name: str
    summary: str
    factors: Mapping[str, str]
    run: Callable[[str, Options, Progress], Iterator[Run]]
    cannot: Callable[[str], str | None]
    steps: int = 0
    live_steps: int = 0
    steps_asked: Callable[[str, Options], int] | None = None
    blocks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    switches: Callable[[str, Options], Sequence[str]] | None = None
    cards_a_rank: Mapping[str, int] = field(default_factory=dict)


# One module an experiment, imported when it is asked for: listing names costs nothing.
_MODULES = {
    "link": "dieplace.experiments.link",
    "flags": "dieplace.experiments.flags",
    "weight-swap": "dieplace.experiments.weight_swap",
    "placement": "dieplace.experiments.placement",
    "context": "dieplace.experiments.context",
    "verify": "dieplace.experiments.verify",
    "cache-type": "dieplace.experiments.cache_type",
    "mode": "dieplace.experiments.mode",
    "first-light": "dieplace.experiments.first_light",
}


def experiment_names() -> tuple[str, ...]:
    """The experiments there are."""
    return tuple(_MODULES)


def refuse_arms(experiment: str, options: Options) -> None:
    """UsageError where arms were named for an experiment whose arms are fixed."""
    if options.arms:
        raise UsageError(f"{experiment} has fixed arms, it does not take --arms", hint="leave --arms out")


def refuse_context(experiment: str, options: Options) -> None:
    """UsageError where a context was named for an experiment that goes through contexts of its own."""
    if options.context_tokens != Options.context_tokens:
        raise UsageError(f"{experiment} has its own contexts, it does not take --context", hint="leave --context out")


def get(name: str) -> Experiment:
    """The experiment called `name`; UsageError lists the names."""
    if name not in _MODULES:
        known = ", ".join(_MODULES)
        raise UsageError(f"no experiment is called {name!r}", hint=f"there is {known}", known=list(_MODULES))
    found: Experiment = importlib.import_module(_MODULES[name]).EXPERIMENT
    return found


def steps_of(experiment: Experiment, backend: str, options: Options) -> int:
    """How often a run calls its progress."""
    if experiment.steps_asked is not None:
        return experiment.steps_asked(backend, options)
    return experiment.live_steps if backend in ("nvidia", "amd") and experiment.live_steps else experiment.steps


@contextmanager
def taking(experiment: Experiment, backend: str, options: Options, progress: Progress) -> Iterator[Iterator[Run]]:
    """The runs of an experiment as each is done. On leaving it is ended at once, not when Python sees fit:
    one that switched modes restores them in its own `finally`."""
    taken = experiment.run(backend, options, progress)
    try:
        yield taken
    finally:
        if isinstance(taken, Generator):
            taken.close()
