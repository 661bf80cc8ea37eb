"""Where partition switches of a node are on record; apart from what writes it, so that a look costs nothing."""

from __future__ import annotations

import os
from pathlib import Path

LIVE_DIRECTORY = Path("/var/lib/dieplace/partition")


def emulated_directory(node: Path) -> Path:
    """The state folder of one emulated node, named by a hash of the node's real path (XDG base directory rules)."""
    import hashlib

    return _emulated_root() / hashlib.sha256(os.fsencode(node.resolve())).hexdigest()[:16]


def anything_on_record(emulated_node: Path | None) -> bool:
    """Whether a switch was ever recorded for this node (None: the live one); False is certain, True is to be read."""
    if emulated_node is None:
        return os.path.exists(LIVE_DIRECTORY)
    return os.path.exists(_emulated_root()) and os.path.exists(emulated_directory(emulated_node))


def _emulated_root() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or ""
    root = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
    return root / "dieplace" / "partition"
