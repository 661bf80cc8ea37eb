"""The emulated node: sysfs, KFD topology, /proc and /dev as a directory tree, and the driver's state machine behind it.

`create(directory, part, cards, mode, **styles)` makes one; `open_node(directory)` finds it again; the tree mirrors
absolute paths, so `Sysfs(directory)` or a private mount namespace can stand in for a real host.
"""

from .check import Violation, check_tree
from .making import MAX_CARDS, create, default_directory, open_node, open_or_create, reset
from .node import STEPS, Node
from .state import Fault, NodeState, Process, Style, style_from_text
from .view import NodeSysfs

__all__ = [
    "MAX_CARDS", "STEPS", "Fault", "Node", "NodeState", "NodeSysfs", "Process", "Style", "Violation", "check_tree",
    "create", "default_directory", "open_node", "open_or_create", "reset", "style_from_text",
]  # fmt: skip
