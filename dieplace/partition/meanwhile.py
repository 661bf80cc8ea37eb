"""What a node looks like in the middle of somebody else's switch is no fact about the node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dieplace.errors import Busy, Unsupported
from dieplace.partition.control import Control


@contextlib.contextmanager
def judged_at_rest(control: Control) -> Iterator[None]:
    """Turn a refusal into Busy (`facts["switching"]`) while another switch holds the lock: between its unload and its
    load the driver is absent, lists are gone and modes cannot be read."""
    locked = control.store.is_locked()
    try:
        yield
    except Unsupported as error:
        if not locked and not control.store.is_locked():
            raise
        raise Busy(
            f"another partition switch is running, and this cannot be planned now: {error.message}",
            hint="wait for it with --wait SECONDS, or look with 'dieplace partition show'",
            holders=[],
            switching=True,
        ) from error
