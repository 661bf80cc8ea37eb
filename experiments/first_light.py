"""first-light: everything that only hardware can answer, asked in one command, with every mode put back and verified.

What it does in order: look at the node, record it, ask what needs no other mode; then, where that is allowed, go
through the modes and ask in each; lead the node back and verify; tell what follows from all that was seen. The bundle
on disk is complete at every moment up to then. A kill leaves the journal of the switch, for `partition restore`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dieplace.errors import ApplyFailed, DieplaceError, NotVerified, Unsupported, UsageError
from dieplace.experiments import first_light_marker as markers
from dieplace.experiments import first_light_modes as modes
from dieplace.experiments.first_light_bundle import AS_FOUND, EMULATED, NOT_MI355X, Bundle, Outcome, require_new
from dieplace.experiments.first_light_catalogue import QUESTIONS
from dieplace.experiments.first_light_child import converse
from dieplace.experiments.first_light_drive import EXPERIMENTS, Drive, Talk, modes_in, questions_for
from dieplace.experiments.first_light_end import close
from dieplace.experiments.first_light_host import host_for, versions
from dieplace.experiments.first_light_modes import Permission, Visit
from dieplace.experiments.first_light_pace import Pace
from dieplace.experiments.first_light_preflight import Preflight
from dieplace.experiments.first_light_preflight import preflight as preflight
from dieplace.experiments.first_light_questions import without
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms

if TYPE_CHECKING:
    from dieplace.experiments.first_light_host import Host
    from dieplace.machine import Machine
    from dieplace.run import Run

Tell = Callable[[str], None]


def first_light(
    host: Host,
    folder: Path,
    permission: Permission | None = None,
    *,
    found: Preflight | None = None,
    skip: Sequence[str] = (),
    step: Tell = lambda text: None,
    detail: Tell = lambda text: None,
    talk: Talk = converse,
) -> Bundle:
    """Ask everything and write the bundle into `folder`; returns it when all is done and verified.

    `found` is what `preflight` said, where somebody was asked about it. Raises NotVerified, with the bundle written,
    where the node is not as it was found; KeyboardInterrupt passes after the node was led back.
    """
    permission = permission or Permission()
    check_names(skip)
    require_new(folder)
    found = found or preflight(host, permission)
    bundle = _begin(host, folder, found, skip)
    pace = Pace(_kinds(host, found), host.origin == "emulated")
    drive = Drive(host, bundle, permission, frozenset(skip), pace, step, detail, talk)
    state, left = "interrupted", None
    try:
        _go_through(drive, found)
        state = "complete"
    finally:
        left = _lead_back(drive, found)
        if left is None and state == "complete":
            left = _mode_experiment(drive, found)
        close(drive, found, state if left is None else "not-restored")
    if left is not None:
        raise left
    return bundle


def _begin(host: Host, folder: Path, found: Preflight, skip: Sequence[str]) -> Bundle:
    from dieplace.conditions import collect

    machine = found.machine
    missing = [q.id for q in QUESTIONS] + list(EXPERIMENTS)
    note = {"emulated": EMULATED, "nvidia": NOT_MI355X}.get(host.backend)
    bundle = Bundle(
        folder=folder, backend=host.backend, origin=host.origin, started=markers.now(),
        start=" and ".join(modes_in(machine)) or AS_FOUND,
        parts=tuple(sorted({card.part or "unknown" for card in machine.cards})), cards=len(machine.cards),
        planned=tuple(map(str, found.visits)) if found.switches else (), versions=versions(),
        conditions=collect(machine), missing=tuple(missing), notes=(note,) if note else (),
    )  # fmt: skip
    bundle.save()
    for question in QUESTIONS:
        if question.id in skip:
            bundle.put(without("not-asked", question.id, "it was left out (--skip)", origin=host.origin))
        elif host.backend not in question.backends:
            why = question.elsewhere or host.why_no_modes
            bundle.put(without("not-asked", question.id, why, origin=host.origin))
    return bundle


def _go_through(drive: Drive, found: Preflight) -> None:
    """Every state in turn. What one of them refuses is kept with the reason, and the next one is tried."""
    host = drive.host
    drive.begin("preflight", "looking at the node")
    machine = drive.look(None)
    where = drive.bundle.start
    if host.control is not None:
        left = markers.put_files_back(found.marker, host.sysfs) if drive.permission.modes else ()
        drive.bundle.notes += tuple(left)
        drive.marker = markers.marker_of(drive.observations[0].facts, running=True)
        why = markers.write(host.control, drive.marker)
        drive.bundle.notes += (f"no marker was left for the next first light: {why}",) if why else ()
    _ask(drive, where, peer=False)
    peer_done = _with_peer(drive, machine, where)
    if host.backend != "amd":  # private nodes, or GPUs without modes: where the node stands does not matter
        for name in EXPERIMENTS:
            drive.run_experiment(name, where)
    elif not peer_done:
        drive.run_experiment("link", where)
    if not found.switches:
        return
    for visit in found.visits:
        if drive.stop:
            drive.bundle.refused[str(visit)] = "not tried, because the switch before it ended unverified"
        elif _enter(drive, visit):
            machine = drive.look(visit)
            if not peer_done and visit.alone is None:
                peer_done = _with_peer(drive, machine, str(visit))
                drive.look(visit)  # again: asking has moved a card's nodes, and what comes is compared with now


def _enter(drive: Drive, visit: Visit) -> bool:
    """Switch; False where it was refused. An end that was not verified stops the tour: only the way back is left."""
    control = drive.host.control
    assert control is not None
    drive.begin("visit", f"switching to {visit}")
    start = drive.observations[0].facts
    away = drive.host.init_while_away
    try:
        drive.switches.append(modes.enter(control, visit, start, drive.permission, drive.detail, away))
    except ApplyFailed as error:
        drive.bundle.refused[str(visit)] = str(error)
        drive.stop = error.facts.get("outcome") not in ("rolled-back", "unchanged", "stale")
        return False
    except DieplaceError as error:
        drive.bundle.refused[str(visit)] = str(error)
        return False
    return True


def _with_peer(drive: Drive, machine: Machine, where: str) -> bool:
    """Ask what needs a peer, where there is one."""
    from dieplace.policy import peer_domain

    try:
        peer_domain(machine, machine.devices[0])
    except (DieplaceError, IndexError):
        return False
    _ask(drive, where, peer=True)
    if drive.host.backend == "amd":
        for name in ("link", "flags", "weight-swap"):
            drive.run_experiment(name, where)
    return True


def _ask(drive: Drive, where: str, *, peer: bool) -> None:
    asked = [q for q in questions_for(drive.host.backend, peer=peer) if q.id not in drive.bundle.answers]
    drive.ask_all(asked, where)


def _lead_back(drive: Drive, found: Preflight) -> DieplaceError | None:
    """Restore and verify; the error where the node is not as it was found, None where it is."""
    control, bundle = drive.host.control, drive.bundle
    if control is None or not drive.observations:
        bundle.restored, bundle.restored_said = True, "nothing was changed"
        return None
    drive.begin("restore", "leading the node back")
    start = drive.observations[0].facts
    try:
        said = modes.lead_back(control, start, drive.permission, drive.detail, found.earlier)
        bundle.restored, bundle.restored_said = True, said
    except DieplaceError as error:
        bundle.restored, bundle.restored_said = False, str(error)
        bundle.save()
        if isinstance(error, NotVerified):
            return error
        return NotVerified(
            f"the node was not led back: {error.message}",
            hint=f"{error.hint + '; ' if error.hint else ''}'dieplace partition restore' leads back",
            outcome="not-verified",
        )
    except BaseException:  # a second Ctrl-C: the journal still leads back
        bundle.restored, bundle.restored_said = False, "it was interrupted: run 'dieplace partition restore'"
        bundle.state = "interrupted"
        bundle.save()
        raise
    return None


def _mode_experiment(drive: Drive, found: Preflight) -> DieplaceError | None:
    """On real cards `mode` switches by itself, from the state that the node is back in; then it is led back again."""
    if drive.host.backend != "amd" or "mode" in drive.bundle.experiments:
        return None
    if not found.switches:
        drive.bundle.experiments["mode"] = Outcome("not-asked", found.why_no_switch or "there is no other mode")
        return None
    drive.run_experiment("mode", drive.bundle.start, in_child=False)
    return _lead_back(drive, found)


def _kinds(host: Host, found: Preflight) -> list[str]:
    """The steps to come, by kind."""
    asked = [q for q in QUESTIONS if q.place != "end" and host.backend in q.backends]
    kinds = ["preflight", *["question"] * len(asked), *["experiment"] * len(EXPERIMENTS)]
    kinds += ["visit"] * len(found.visits) if found.switches else []
    return [*kinds, *(["restore"] if host.control is not None else [])]


def check_names(skip: Sequence[str]) -> None:
    """UsageError for something to leave out that is neither a question nor an experiment."""
    known = [*(q.id for q in QUESTIONS), *EXPERIMENTS]
    for name in skip:
        if name not in known:
            raise UsageError(f"first light has no part {name!r} to leave out", hint=f"there is {', '.join(known)}")


def steps(host: Host, found: Preflight) -> int:
    """How often `step` will be called, about."""
    return len(_kinds(host, found))


def cannot(backend: str) -> str | None:
    """None where there is something to ask; elsewhere why not."""
    if backend in ("amd", "emulated", "nvidia"):
        return None
    return "a recording answers what it recorded" if backend == "replayed" else "host memory nodes have no dies to ask"


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for a caller from Python that named none."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dieplace-first-light-") as folder:
        yield Path(folder)


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """The runs of a first light without any change of modes; the command gives the bundle and asks for more."""
    from dieplace.binding.ranks import torchrun

    refuse_arms("first-light", options)
    if torchrun(os.environ) is not None:
        raise UsageError("first-light asks a whole node, so one process runs it", hint="start it without torchrun")
    why = cannot(backend)
    if why is not None:
        raise Unsupported(f"first-light cannot run on the {backend} backend: {why}")
    with own_folder() as folder:
        bundle = first_light(host_for(backend), folder, step=progress)
        for runs in bundle.runs().values():
            yield from runs


EXPERIMENT = Experiment(
    name="first-light",
    summary="what only hardware can answer: modes, ranges, peer access, flags, latencies; one bundle to send back",
    factors={"mode": "every mode that the cards offer, with --allow-mode-changes"},
    run=run,
    cannot=cannot,
    steps=len(QUESTIONS) + len(EXPERIMENTS),
)
