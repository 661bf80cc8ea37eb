"""Hosts for the tests of first light: a small emulated node under an injected clock, asked within this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from partition_support import FAST, FakeClock, small_node

from dieplace.backends.amd.control_emulated import emulated_control
from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import Node
from dieplace.errors import DieplaceError
from dieplace.experiments import first_light_child as child
from dieplace.experiments import registry
from dieplace.experiments.first_light_host import AmdHost, EmulatedHost
from dieplace.experiments.first_light_modes import Permission
from dieplace.run import Point, Quantity, Run

ALLOWED = Permission(modes=True, limits=FAST)
NO_EXPERIMENTS = ("link", "flags", "weight-swap", "mode")


def host_on(node: Node, clock: FakeClock) -> EmulatedHost:
    """The emulated host of a node, whose switches take no real time."""
    host = EmulatedHost(EmulatedBackend(node, environ={}))
    host.control = emulated_control(node, clock=clock)
    return host


def amd_host_on(node: Node, clock: FakeClock, smi: Any) -> AmdHost:
    """The code for live AMD nodes over the emulated driver, with a library that was told what to say."""
    host = AmdHost(EmulatedBackend(node, environ={}))
    host.control = emulated_control(node, clock=clock)
    host.smi = host.smi_while_away = smi
    return host


def node_in(folder: Path, mode: str = "SPX/NPS1", **styles: object) -> tuple[Node, FakeClock]:
    """A node of two cards."""
    clock = FakeClock()
    return small_node(folder / "node", clock, mode=mode, **styles), clock


class Here:
    """Talk to a child that is this process; experiments give one small run each. `lose` names questions that end it."""

    def __init__(
        self, machine: Callable[[], Any], *, lose: tuple[str, ...] = (), failing: tuple[str, ...] = ()
    ) -> None:
        self.machine = machine
        self.lose = lose
        self.failing = failing
        self.requests: list[Mapping[str, Any]] = []

    def __call__(self, request: Mapping[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        self.requests.append(request)
        if request["do"] == "run":
            yield from self._run(request)
            return
        from dieplace.experiments.first_light_catalogue import question
        from dieplace.experiments.first_light_devices import scene_of
        from dieplace.experiments.first_light_questions import safely

        try:
            made = self.machine()
            scene = made if hasattr(made, "hands") else scene_of(made)
        except DieplaceError as error:
            yield {"error": error.to_json(), "text": str(error)}
            return
        for name in request["questions"]:
            yield {"asking": name}
            if name in self.lose:
                raise child.Lost("the process that asked died with signal 11", why="died with signal 11")
            yield {"answer": safely(question(name), scene, scene.origin).to_json()}
        yield {"end": True}

    def _run(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        why = registry.get(request["experiment"]).cannot(request["backend"])
        if why is not None and request["backend"] != "amd":  # no AMD card is here; the tests are of what follows
            yield {"cannot": why}
            return
        yield {"progress": "measuring"}
        if request["experiment"] in self.failing:
            yield {"error": {}, "text": "no kernel for it"}
            return
        point = Point("local", {"token_us": Quantity("us", "modelled", 1.0)})
        run = Run(request["experiment"], "block", "modelled", "emulated", (point,), {}, {"name": "x"}, {}, "now")
        path = run.save(Path(request["folder"]) / f"{request['prefix']}-{run.block}.json")
        yield {"run": path.name}
        yield {"end": True}


class ToldSmi:
    """AMD's library, told what to say: reply by request, or `rest`."""

    def __init__(self, **replies: Mapping[str, Any]) -> None:
        self.replies: dict[str, Mapping[str, Any]] = {
            "versions": {"ok": True, "versions": {"library": "26.0.2", "binding": "7.0.2"}}, **replies,
        }  # fmt: skip
        self.asked: list[str] = []

    def ask(self, op: str, **request: Any) -> Mapping[str, Any]:
        self.asked.append(op)
        return self.replies[op]
