"""One block of `mode` on AMD cards, measured by a child process: a driver that somebody holds cannot be reloaded.

A block is one logical device that serves a request alone: the whole card in SPX, one die in DPX. Halves on both dies
are not measured, for launches that wait for one another on two dies have not been tried on hardware.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.errors import BackendError, DieplaceError
from dieplace.experiments.registry import Options, Progress
from dieplace.machine import Machine
from dieplace.run import Run

if TYPE_CHECKING:
    from dieplace.experiments.mode import Take

LIMIT_S = 900.0
LAYERS = 8
_OPTIONS = ("model", "precision", "context_tokens", "label")
ONE_DEVICE = (
    "one logical device serves a request alone: the whole card in SPX, one die in DPX and the other idle; halves on"
    " both dies at once are not measured"
)


def cannot_here(backend: str) -> str | None:
    """None where a decode step can be timed on the cards of this host; else why not."""
    from dieplace.experiments.step_cases import live_why_not

    return live_why_not(backend)


def refuse_other_forms(options: Options) -> None:
    """UsageError for a step that the measured one is not; called before anything is switched."""
    from dataclasses import replace

    from dieplace.experiments.step_cases import refuse_other_forms as refuse

    # One device serves the request whatever --shards says: `mode` has one form on devices, and 2 is the default.
    refuse("mode", "amd", replace(options, shards=1))


def take_in_child(options: Options, progress: Progress) -> Take:
    """A block measured by a child process, which opens the driver and is gone when the next switch begins."""

    def take(machine: Machine, block: str, mode: str) -> Run:
        with tempfile.TemporaryDirectory(prefix="dieplace-mode-") as folder:
            path = Path(folder) / f"{block}.json"
            asked = {key: getattr(options, key) for key in _OPTIONS}
            progress(f"{mode}: measured by a process of its own")
            _run_child([block, mode, str(path), json.dumps(asked)], mode)
            return Run.load(path)

    return take


def _run_child(words: Sequence[str], mode: str) -> None:
    """Run this module as a program. BackendError with the child's last line where it fails or takes too long."""
    command = [sys.executable, "-P", "-m", "dieplace.experiments.mode_child", *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"measuring in {mode} took more than {LIMIT_S:g} s and was ended", hint="see the kernel log for GPU faults"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise BackendError(
            f"measuring in {mode} ended with exit code {done.returncode}: {lines[-1]}",
            hint="run the same step alone to see all of it: dieplace bench run weight-swap --shards 1",
        )


def measure_block(machine: Machine, rig: Any, block: str, mode: str, options: Options, plan: Any = None) -> Run:
    """The Run of one block on the first visible device of `rig`: every role local, audited before and after."""
    from dieplace.experiments import weight_swap_live as rules
    from dieplace.experiments.harness import measure
    from dieplace.experiments.rotation import rotation
    from dieplace.experiments.step_bench import PlacedLayers
    from dieplace.experiments.step_recipe import gpt_oss
    from dieplace.experiments.step_run import PLAN
    from dieplace.run import Point

    device = machine.device(rig.readers[0])
    before = rig.telemetry()
    layers = PlacedLayers(machine, device, LAYERS, gpt_oss())
    try:
        first, (code_hash, why) = _audited(layers), _code_of(layers)
        # The harness compares: a mode's one arm stands against itself, beside the control that it always has.
        measured = measure({"local": layers.sample, "again": layers.sample}, plan or PLAN)
        if not measured.order:
            raise KeyboardInterrupt
        last = _audited(layers)
        nbytes = sum(layers.reads.values())
        spread = rotation(max(1, round(nbytes)), rig.cache_bytes, LAYERS, fixed=True)
        far = 0.0 if device.local_guaranteed else None  # over both dies: nobody knows which reads crossed
        point = Point(
            "local",
            rules.quantities("local", measured, moved_bytes=0.0, rates=(1.0, 1.0), refused=None),
            factors={
                "bytes_read": nbytes,
                "bytes_read_far": far,
                "cache": "cold" if spread.cold else "warm",
                "device": device.id,
            },
            residency_before=first,
            residency_after=last,
        )
    finally:
        layers.free()
    return _as_run(machine, rig, (block, mode), options, (point,), (code_hash, why), before, measured)


def _audited(layers: Any) -> dict[str, Any]:
    """Bytes by role and domain; raises where a role is not where it was asked."""
    from dieplace.residency import audit

    found = audit(*[buffer for one in layers.layers for buffer in one.buffers.values()], layers.work).require_placed()
    roles = sorted({item.role for item in found.items})
    homes = {role: found.bytes_by_domain(role) for role in roles}
    return {"evidence": found.evidence, "bytes_by_role_and_domain": homes}


def _code_of(layers: Any) -> tuple[str | None, str | None]:
    from dieplace.experiments import step_bench
    from dieplace.experiments.step_recipe import together

    with step_bench.binaries.watch() as seen:
        together(layers.launches)()
    found: tuple[str | None, str | None] = step_bench.hash_of(seen)
    return found


def _as_run(
    machine: Machine, rig: Any, named: tuple[str, str], options: Options, points: tuple[Any, ...],
    code: tuple[str | None, str | None], before: Any, measured: Any,
) -> Run:  # fmt: skip
    from dieplace.experiments.link_run import conditions_of
    from dieplace.experiments.torch_rig import without_serials

    after = rig.telemetry()
    what = f"{LAYERS} layers of {options.model}, one device, context {options.context_tokens}"
    conditions = conditions_of(machine, after, *code, what, rig.timer)
    device = machine.device(rig.readers[0])
    note = getattr(rig, "not_this_part", None)
    return Run(
        experiment="mode",
        block=named[0],
        origin="measured",
        source=machine.source,
        points=points,
        conditions=conditions,
        workload={
            "name": f"{options.model} {options.precision}", "model": options.model, "precision": options.precision,
            "shards": 1, "context_tokens": options.context_tokens, "layers": LAYERS,
        },
        machine=without_serials(machine.to_json()),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed=measured.seed,
        code_hash=code[0],
        code_hash_why=code[1],
        notes=(*([note] if note else []), ONE_DEVICE),
        facts={
            "mode": named[1], "executing": [device.id], "xcds": device.xccs, "visible": list(rig.readers),
            "local_guaranteed": device.local_guaranteed, "stopped": measured.stopped,
            "order": [list(names) for names in measured.order],
            "telemetry_before": dict(before), "telemetry_after": after, "clock_share": after["clock_share"],
        },
    )  # fmt: skip


def main(words: Sequence[str]) -> int:
    """`BLOCK MODE PATH OPTIONS`: measure and save; a mistake is one line on stderr and its exit code."""
    from dieplace.discover import discover
    from dieplace.experiments.torch_rig import TorchRig

    block, mode, path, asked = words
    try:
        machine = discover("amd")
        with TorchRig(machine) as rig:
            measure_block(machine, rig, block, mode, Options(shards=1, **json.loads(asked))).save(path)
    except DieplaceError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
