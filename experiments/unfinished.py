"""A run that is not done yet, kept in its folder so that an interrupted or killed one can be gone on with.

`DIR/unfinished/run.json` says what is measured (options, devices, driver, seed, plan) and under which conditions each
sitting began; one file a case beside it holds its code hash and every sample, written whole after each block. They go
when the run is done.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dieplace.errors import Busy, UsageError
from dieplace.experiments.harness import Measured, require_whole
from dieplace.experiments.registry import Options
from dieplace.whole_file import write_whole

SCHEMA = "dieplace/unfinished/1"
FOLDER = "unfinished"
OPTIONS = ("model", "precision", "context_tokens", "shards", "bytes_from", "arms")


class Unfinished:
    """The work of one run so far. `identity` is what has to be equal for samples to belong together.

    Raises UsageError (exit 2) naming what differs from the work in the folder, Busy where another process is at it.
    """

    def __init__(self, folder: Path | None, identity: Mapping[str, Any], conditions: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else folder / FOLDER
        self.sittings: list[dict[str, Any]] = []
        self._lock: int | None = None
        wanted: dict[str, Any] = json.loads(json.dumps(dict(identity), allow_nan=False))
        if self._folder is not None:
            self._lock = _locked(self._folder)
        try:
            found = read(folder)
            if found is not None and folder is not None:
                _require_equal(found["identity"], wanted, folder)
                self.sittings = list(found["sittings"])
            self.sittings.append({"conditions": dict(conditions)})
            self._save("run.json", {"identity": wanted, "sittings": self.sittings})
        except BaseException:
            self.close()
            raise

    def earlier(self, case: str, code_hash: str | None) -> Measured | None:
        """What was measured of a case, None where nothing was; UsageError where it was of other machine code."""
        body = None if self._folder is None else _load(self._folder / _file(case))
        if body is None or self._folder is None:
            return None
        if body.get("code_hash") != code_hash:
            key = f"code_hash of {case}" if case else "code_hash"
            _refuse(self._folder.parent, {key: (body.get("code_hash"), code_hash)})
        return _measured(body, self._folder / _file(case))

    def keeper(self, case: str, code_hash: str | None) -> Callable[[Measured], None]:
        """A function that writes everything measured of a case."""

        def keep(measured: Measured) -> None:
            self._save(_file(case), {"case": case, "code_hash": code_hash, "measured": asdict(measured)})

        return keep

    def close(self) -> None:
        """Let another process go on with it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _save(self, name: str, body: Mapping[str, Any]) -> None:
        if self._folder is not None:
            write_whole(self._folder / name, json.dumps({"schema": SCHEMA, **body}, allow_nan=False) + "\n")


def read(folder: Path | None) -> dict[str, Any] | None:
    """What is being measured in a folder: `identity` and `sittings`; None where nothing is unfinished."""
    path = Path() if folder is None else folder / FOLDER / "run.json"
    found = None if folder is None else _load(path)
    if found is None:
        return None
    sittings = found.get("sittings")
    if not (isinstance(found.get("identity"), dict) and isinstance(sittings, list)):
        raise _damaged(path, "it does not say what was measured")
    if not all(isinstance(one, dict) and isinstance(one.get("conditions"), dict) for one in sittings):
        raise _damaged(path, "a sitting does not say under which conditions it was")
    return found


def begun_as(folder: Path) -> tuple[str, str] | None:
    """(experiment, backend) of the unfinished run in a folder; None where nothing is unfinished."""
    found = read(folder)
    if found is None:
        return None
    experiment, backend = (found["identity"].get(key) for key in ("experiment", "backend"))
    if not isinstance(experiment, str) or not isinstance(backend, str):
        raise _damaged(folder / FOLDER / "run.json", "it does not name its experiment and backend")
    return experiment, backend


def continued(folder: Path, experiment: str, options: Options, given: Collection[str]) -> Options:
    """The options of the unfinished run in a folder; `given` names those a caller chose anew, which must agree.

    UsageError (exit 2) where nothing is unfinished there, or naming what differs.
    """
    found = read(folder)
    if found is None:
        raise UsageError(f"no run is unfinished in {folder}", hint="measure anew: leave --resume out")
    saved = found["identity"]
    differing = {"experiment": (saved.get("experiment"), experiment)} if saved.get("experiment") != experiment else {}
    kept: dict[str, Any] = {}
    for key in OPTIONS:
        asked = getattr(options, key)
        was = _of_kind(saved.get(key), asked, folder / FOLDER / "run.json", key)
        if key in given and was != asked:
            differing[key] = (was, asked)
        kept[key] = was
    if differing:
        _refuse(folder, differing)
    return replace(options, **kept)


def _of_kind(value: Any, like: Any, path: Path, key: str) -> Any:
    """An option as it was saved, which must be of the kind that the option is."""
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(like, tuple) and texts:
        return tuple(value)
    if isinstance(like, tuple) or type(value) is not type(like):
        raise _damaged(path, f"its {key} is {value!r:.60}")
    return value


def clear(folder: Path, experiment: str, backend: str) -> None:
    """The run is done: forget the way there. Another run's, which happens to share the folder, is left alone."""
    found = read(folder)
    if found is not None and (found["identity"].get("experiment"), found["identity"].get("backend")) == (
        experiment,
        backend,
    ):
        shutil.rmtree(folder / FOLDER, ignore_errors=True)


def cases(folder: Path) -> tuple[str, ...]:
    """The files of cases of which a block or more was measured."""
    return tuple(sorted(path.name for path in (folder / FOLDER).glob("case-*.json")))


def _file(case: str) -> str:
    return f"case-{re.sub('[^A-Za-z0-9.]+', '-', case) or 'only'}.json"


def _require_equal(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    keys = [key for key in dict.fromkeys((*found, *wanted)) if found.get(key) != wanted.get(key)]
    if keys:
        _refuse(folder, {key: (found.get(key), wanted.get(key)) for key in keys})


def _refuse(folder: Path, differing: Mapping[str, tuple[Any, Any]]) -> None:
    told = "; ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in differing.items())
    raise UsageError(
        f"the unfinished run in {folder} cannot be gone on with: {told}",
        hint="make these equal, or measure into another folder with --out",
        differing=list(differing),
    )


def _measured(body: Mapping[str, Any], path: Path) -> Measured:
    try:
        data = body["measured"]
        return require_whole(
            Measured(
                seed=int(data["seed"]),
                samples={str(arm): tuple(float(v) for v in values) for arm, values in data["samples"].items()},
                warmups={str(arm): tuple(float(v) for v in values) for arm, values in data["warmups"].items()},
                order=tuple(tuple(str(name) for name in block) for block in data["order"]),
                stopped=str(data["stopped"]),
                notes=tuple(str(note) for note in data["notes"]),
                sittings=tuple(int(n) for n in data["sittings"]),
                spent_s=float(data["spent_s"]),
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(path, f"{type(error).__name__} {error}") from error


def _load(path: Path) -> dict[str, Any] | None:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(body, allow_nan=False)  # NaN, and numbers too large for a float, are of no file of ours
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise _damaged(path, f"its schema is not {SCHEMA}")
    return body


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} cannot be gone on with: {why}", hint="remove the folder, or name another with --out")


def _locked(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise UsageError(
            f"cannot keep what is measured in {folder}: {error.strerror}", hint="name another folder with --out"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise Busy(f"another process is measuring into {folder.parent}", hint="wait for it, or use --out") from error
    return handle
