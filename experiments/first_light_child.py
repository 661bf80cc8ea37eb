"""The process that opens devices for first light, and how its parent talks to it: one JSON value a line.

`python -P -m dieplace.experiments.first_light_child '{"do": ...}'` asks questions (`ask`), runs one experiment (`run`),
or holds a little device memory until its input closes (`hold`). A question that crashes the process costs that question
only: the parent starts another process for the rest.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.errors import BackendError, DieplaceError

if TYPE_CHECKING:
    from dieplace.machine import Machine

LAST_WORDS_S = 30.0  # how long a process may take to keep what it has after Ctrl-C
Request = Mapping[str, Any]
Say = Callable[[Mapping[str, Any]], None]


class Lost(BackendError):
    """The process ended or fell silent before it had said all; `facts["why"]` says which."""


def command_of(request: Request) -> list[str]:
    """The command line of a child."""
    return [sys.executable, "-P", "-m", "dieplace.experiments.first_light_child", json.dumps(request)]


def converse(request: Request, limit_s: float) -> Iterator[dict[str, Any]]:
    """What a child says, as it says it; Lost where it dies or is silent for `limit_s` seconds.

    Its stderr is ours. Ctrl-C reaches it as well: it gets time to keep what it has, and is gone when this returns.
    """
    process = subprocess.Popen(command_of(request), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    said_all = False
    try:
        for line in talk(process, limit_s):
            said = json.loads(line)
            said_all = said_all or "end" in said
            yield said
        process.wait(LAST_WORDS_S)
    except KeyboardInterrupt:
        _let_end(process)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(LAST_WORDS_S)
        if process.stdout is not None:
            process.stdout.close()
    if not said_all:
        status = process.returncode
        why = f"died with signal {-status}" if status < 0 else f"ended with status {status}"
        raise Lost(f"the process that asked {why}", why=why)


def talk(process: subprocess.Popen[str], limit_s: float) -> Iterator[str]:
    """Lines of a process's output until it closes it; Lost where none comes for `limit_s` seconds."""
    assert process.stdout is not None
    number, rest = process.stdout.fileno(), b""
    deadline = time.monotonic() + limit_s
    while True:
        ready, _, _ = select.select([number], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            process.kill()
            raise Lost(f"the process that asked was silent for {limit_s:.0f} s and was ended", why="silent")
        part = os.read(number, 1 << 16)
        if not part:
            return
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace")
            deadline = time.monotonic() + limit_s


def _let_end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(LAST_WORDS_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()


def main() -> int:
    """Carry out one request; what vendor libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.argv[1])

    def say(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value, allow_nan=False) + "\n")
        answers.flush()

    try:
        {"ask": ask, "run": run, "hold": hold}[request["do"]](request, say)
    except DieplaceError as error:
        say({"error": error.to_json(), "text": str(error)})
    except KeyboardInterrupt:
        return 130
    say({"end": True})
    answers.flush()
    # Not a normal exit: runtimes have crashed in their destructors, after everything was said.
    os._exit(0)


def ask(request: Request, say: Say) -> None:
    """Answer the questions of `request["questions"]` in order; each is announced before it is asked."""
    from dieplace.experiments.first_light_catalogue import question
    from dieplace.experiments.first_light_devices import scene_of
    from dieplace.experiments.first_light_questions import safely

    scene = scene_of(machine_of(request))
    for name in request["questions"]:
        say({"asking": name})
        say({"answer": safely(question(name), scene, scene.origin).to_json()})


def run(request: Request, say: Say) -> None:
    """Run one experiment and save each of its runs as soon as it is there; whether it can run is asked here too, as
    the answer may start a runtime."""
    from dieplace.experiments import registry

    why = registry.get(request["experiment"]).cannot(request["backend"])
    if why is not None:
        say({"cannot": why})
        return
    options = registry.Options(**{key: _listed(value) for key, value in request["options"].items()})
    experiment = registry.get(request["experiment"])
    folder = Path(request["folder"])
    for found in experiment.run(request["backend"], options, lambda text: say({"progress": text})):
        path = found.save(folder / f"{request['prefix']}-{found.block}.json")
        say({"run": path.name})


def hold(request: Request, say: Say) -> None:
    """Keep some memory of the first device until the input closes."""
    machine = machine_of(request)
    device = next(d for d in machine.devices if d.runtime_index == 0)
    with machine.allocate(int(request["nbytes"]), device=device, role="activation"):
        say({"holding": device.id})
        sys.stdin.read()


def machine_of(request: Request) -> Machine:
    """The machine that a request names."""
    from dieplace.discover import discover

    return discover(request["backend"], node=request.get("node"))


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


if __name__ == "__main__":
    raise SystemExit(main())
