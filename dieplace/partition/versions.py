"""Which software refused or failed: most odd device counts and refusals are a driver, library and tool out of step.

(gpu-operator issues 140 and 235: a count that is wrong, or N/A, with nothing in the message to tell why.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dieplace.errors import ApplyFailed, BackendError, DieplaceError, StaleMachine, Unsupported
from dieplace.partition.control import Control


@contextlib.contextmanager
def told_with_versions(control: Control) -> Iterator[None]:
    """Add the versions to every error from inside that the software may be the cause of: once, in text and in facts."""
    try:
        yield
    except (Unsupported, ApplyFailed, BackendError) as error:
        if not isinstance(error, StaleMachine):
            _add(error, control.versions())
        raise


def _add(error: DieplaceError, versions: dict[str, str]) -> None:
    if "versions" in error.facts:
        return
    error.facts["versions"] = versions
    error.message += f" [{', '.join(f'{name} {version}' for name, version in versions.items())}]"
