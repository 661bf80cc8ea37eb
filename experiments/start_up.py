"""How long the quick commands take to start, against the imports that a small command line tool cannot avoid.

`python -m dieplace.experiments.start_up` prints the median ratio of alternated runs. The yardstick is
`python -c "import click, rich.console, rich.table"`; alternation and the ratio of neighbours cancel a busy machine's
drift. Measured on the host it runs on; no accelerator takes part.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

YARDSTICK = (sys.executable, "-c", "import click, rich.console, rich.table")
COMMANDS: dict[str, tuple[str, ...]] = {
    "--help": ("--help",),
    "list": ("--backend", "emulated", "list"),
    "list of 64 devices": ("--backend", "emulated", "--node", "NODE", "list"),
}
LIMIT = 1.5


def measure(pairs: int = 15) -> dict[str, dict[str, float]]:
    """Median seconds of command and yardstick and the median ratio of neighbours, by command.

    The emulated nodes are made first: a first use is not what is timed.
    """
    script = os.path.join(os.path.dirname(sys.executable), "dieplace")
    start = (script,) if os.path.exists(script) else (sys.executable, "-m", "dieplace.cli")
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "XDG_STATE_HOME": folder, "PYTHONSAFEPATH": "1"}
        node = os.path.join(folder, "cpx")
        subprocess.run(
            [*start, "emulate", "new", node, "--mode", "CPX/NPS2"], env=environ, check=True, capture_output=True
        )
        found = {}
        for name, words in COMMANDS.items():
            command = [*start, *(node if word == "NODE" else word for word in words)]
            found[name] = _alternate(command, environ, pairs)
    return found


def _alternate(command: Sequence[str], environ: Mapping[str, str], pairs: int) -> dict[str, float]:
    for _ in range(2):  # file caches
        _seconds(YARDSTICK, environ)
        _seconds(command, environ)
    ours: list[float] = []
    theirs: list[float] = []
    for index in range(pairs):
        order = (YARDSTICK, command) if index % 2 else (command, YARDSTICK)
        for words in order:
            (theirs if words is YARDSTICK else ours).append(_seconds(words, environ))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "command_s": statistics.median(ours),
        "yardstick_s": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "pairs": pairs,
    }


def _seconds(command: Sequence[str], environ: Mapping[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(list(command), env=dict(environ), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(json.dumps({"limit": LIMIT, "origin": "measured", "commands": measure()}, indent=1))
