"""The whole tree of an emulated node as a function of its state."""

from __future__ import annotations

from .entries import Entries
from .state import NodeState
from .tree_card import cards
from .tree_host import host
from .tree_kfd import kfd


def tree(state: NodeState) -> Entries:
    """Every path of the node, relative to its directory, and what stands there."""
    return host(state) | cards(state) | kfd(state)
