"""The steps of a first light while it runs: asking, running experiments, looking. Every answer is kept at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dieplace.errors import DieplaceError
from dieplace.experiments import registry
from dieplace.experiments.first_light_bundle import AS_FOUND, Bundle, Outcome, slug
from dieplace.experiments.first_light_catalogue import QUESTIONS
from dieplace.experiments.first_light_child import Lost, converse
from dieplace.experiments.first_light_marker import Marker, with_put_back, write
from dieplace.experiments.first_light_modes import Permission, Switched, Visit
from dieplace.experiments.first_light_node import NodeScene
from dieplace.experiments.first_light_pace import Pace
from dieplace.experiments.first_light_questions import Answer, Question, safely, without
from dieplace.experiments.first_light_seen import Observation, Seen, observe

if TYPE_CHECKING:
    from dieplace.experiments.first_light_host import Host
    from dieplace.machine import Machine

Talk = Callable[[Mapping[str, Any], float], Iterator[dict[str, Any]]]
EXPERIMENTS = ("link", "flags", "weight-swap", "mode")
ASK_LIMIT_S = 180.0  # the slowest question fills a die; kernels end their waits by themselves
RUN_LIMIT_S = 600.0  # an experiment tells of progress far more often


class Pseudonyms:
    """Ids as small numbers, equal ones equal, over all states: a bundle names nobody's hardware."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def of(self, unique: str | None) -> str | None:
        """The pseudonym of an id; None stays None."""
        if unique is None:
            return None
        return self._numbers.setdefault(unique, f"id {len(self._numbers) + 1}")


@dataclass
class Drive:
    """What moves. `step` hears each step with the time left, `detail` what happens inside one."""

    host: Host
    bundle: Bundle
    permission: Permission
    skip: frozenset[str]
    pace: Pace
    step: Callable[[str], None]
    detail: Callable[[str], None]
    talk: Talk = converse
    marker: Marker | None = None
    stop: bool = False  # a switch ended unverified: no other may follow but the one back
    observations: list[Observation] = field(default_factory=list)
    switches: list[Switched] = field(default_factory=list)
    ids: dict[str, dict[str, str | None]] = field(default_factory=dict)
    names: Pseudonyms = field(default_factory=Pseudonyms)

    def begin(self, kind: str, text: str) -> None:
        """Tell of a step of one of the pace's kinds."""
        self.step(f"{text}, {self.pace.step(kind)}")

    def seen(self) -> Seen:
        """What the questions of the end are told from."""
        return Seen(self.host.origin, tuple(self.observations), tuple(self.switches), dict(self.bundle.refused))

    # -- looking ---------------------------------------------------------------------------------------------------

    def look(self, visit: Visit | None) -> Machine:
        """Record the node as it is now."""
        machine = self.host.machine()
        state = str(visit) if visit is not None else " and ".join(modes_in(machine)) or AS_FOUND
        if self.host.control is not None:
            may_ask = self.permission.modes
            self.observations.append(observe(self.host.control, visit, may_ask=may_ask))
        self.bundle.save_tree(state, self.host.tree())
        self.ids[state] = {device.id: self.names.of(device.unique_id) for device in machine.devices}
        return machine

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask_all(self, wanted: Sequence[Question], mode: str) -> None:
        """Ask the questions of a state: those of devices in a process of their own, then those of the node here, which
        may leave KFD's order of devices another one."""
        self.ask_devices([one.id for one in wanted if one.place == "devices"], mode)
        for one in wanted:
            if one.place == "node":
                self.begin("question", f"asking {one.id} in {mode}")
                self.keep(safely(one, self._node_scene(), self.host.origin), mode)

    def ask_devices(self, names: Sequence[str], mode: str) -> None:
        """Ask in a process of its own; a question that ends it costs that question, and another process goes on."""
        left = list(names)
        while left:
            asking: str | None = None
            try:
                for said in self.talk(self._request(left), ASK_LIMIT_S):
                    if "asking" in said:
                        asking = str(said["asking"])
                        self.begin("question", f"asking {asking} in {mode}")
                    elif "answer" in said:
                        found = Answer.from_json(said["answer"])
                        self.keep(found, mode)
                        left.remove(found.question)
                        asking = None
                    elif "error" in said:  # before any question: the machine cannot be opened there
                        for name in left:
                            self.keep(without("refused", name, str(said["text"]), origin=self.host.origin), mode)
                        return
                if left:
                    raise Lost("the process that asked ended early", why="ended early")
            except Lost as error:
                lost = asking or left[0]
                self.keep(without("unknown", lost, error.message, origin=self.host.origin), mode)
                left.remove(lost)

    def ask_one(self, name: str) -> Answer:
        """One question of the devices, for another question; nothing is kept."""
        for said in self.talk(self._request([name]), ASK_LIMIT_S):
            if "answer" in said:
                return Answer.from_json(said["answer"])
            if "error" in said:
                return without("refused", name, str(said["text"]), origin=self.host.origin)
        raise Lost("the process that asked ended early", why="ended early")

    def keep(self, answer: Answer, mode: str | None) -> None:
        """Keep an answer with the mode that it was asked in."""
        self.bundle.put(Answer(**{**vars(answer), "mode": mode}))

    def _request(self, names: Sequence[str]) -> dict[str, Any]:
        return {"do": "ask", "backend": self.host.backend, "node": self.host.node, "questions": list(names)}

    def _node_scene(self) -> NodeScene:
        control = self.host.control
        assert control is not None
        start = self.observations[0].facts
        return NodeScene(self.host, control, self.permission, start, self.remember, self.ask_one)

    def remember(self, path: str, text: str | None) -> None:
        """Note, beside the record of switches, a file that is changed for a moment; None once it is put back."""
        if self.marker is not None and self.host.control is not None:
            self.marker = with_put_back(self.marker, path, text)
            write(self.host.control, self.marker)

    # -- running ---------------------------------------------------------------------------------------------------

    def run_experiment(self, name: str, mode: str, *, in_child: bool = True) -> None:
        """Run an experiment and keep its runs as they come; where it cannot run, keep why."""
        self.begin("experiment", f"running {name} in {mode}")
        before = self.bundle.experiments.get(name, Outcome("not-asked"))
        why = self._left_out(name, in_child)
        if why is not None:
            self._end_experiment(name, Outcome("not-asked", why, before.runs))
            return
        kept = list(before.runs)
        try:
            for said in self._runs(name, mode, in_child):
                if "run" in said:
                    kept.append(f"runs/{said['run']}")
                    self._end_experiment(name, Outcome("ran", "it has not ended", tuple(kept)))
                elif "cannot" in said:
                    self._end_experiment(name, Outcome("not-asked", str(said["cannot"]), tuple(kept)))
                    return
                elif "progress" in said:
                    self.detail(f"{name}: {said['progress']}")
                elif "error" in said:
                    self._end_experiment(name, Outcome("refused", str(said["text"]), tuple(kept)))
                    return
        except DieplaceError as error:
            status = "unknown" if isinstance(error, Lost) else "refused"
            self._end_experiment(name, Outcome(status, str(error), tuple(kept)))
            return
        self._end_experiment(name, Outcome("ran", "" if kept else "it gave no run", tuple(kept)))

    def _runs(self, name: str, mode: str, in_child: bool) -> Iterator[Mapping[str, Any]]:
        # Elsewhere an experiment has nodes of its own, or no modes: where the node stands names nothing.
        prefix = f"{name}-{slug(mode)}" if self.host.backend == "amd" else name
        folder = self.bundle.folder / "runs"
        options = experiment_options(name, self.host.backend, self.permission)
        if in_child:
            request = {
                "do": "run", "backend": self.host.backend, "experiment": name, "options": options, "prefix": prefix,
                "folder": str(folder),
            }  # fmt: skip
            yield from self.talk(request, RUN_LIMIT_S)
            return
        chosen = registry.Options(**options)
        for run in registry.get(name).run(self.host.backend, chosen, lambda text: self.detail(f"{name}: {text}")):
            yield {"run": run.save(folder / f"{prefix}-{run.block}.json").name}

    def _left_out(self, name: str, in_child: bool) -> str | None:
        if name in self.skip:
            return "it was left out (--skip)"
        if name not in registry.experiment_names():
            return "this release has no such experiment"
        return None if in_child else registry.get(name).cannot(self.host.backend)

    def _end_experiment(self, name: str, outcome: Outcome) -> None:
        self.bundle.experiments[name] = outcome
        self.bundle.missing = tuple(one for one in self.bundle.missing if one != name)
        self.bundle.save()


def experiment_options(name: str, backend: str, permission: Permission) -> dict[str, Any]:
    """What an experiment is asked for: its defaults, and what the backend has a form of."""
    options: dict[str, Any] = {"allow_unvalidated": permission.unvalidated}
    if name == "weight-swap" and backend == "nvidia":
        options["shards"] = 1
    if name == "mode" and backend == "amd":
        options["consent"] = permission.modes
    return options


def questions_for(backend: str, *, peer: bool) -> tuple[Question, ...]:
    """The questions that are asked in a state, with a peer or without one."""
    return tuple(q for q in QUESTIONS if q.place != "end" and q.needs_peer == peer and backend in q.backends)


def modes_in(machine: Machine) -> list[str]:
    """The modes of a machine's cards, each once."""
    return list(dict.fromkeys(str(card.mode) for card in machine.cards if card.mode is not None))
