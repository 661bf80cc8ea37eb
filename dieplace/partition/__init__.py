"""Partition switching: plan, apply, verify, restore, with a journal; a backend gives the control."""

from dieplace.partition.entry import apply, partitioned, plan, restore, standing
from dieplace.partition.facts import CardFacts, DeviceFacts, NodeFacts
from dieplace.partition.plan import Blast, Plan, Step

__all__ = [
    "Blast", "CardFacts", "DeviceFacts", "NodeFacts", "Plan", "Step", "apply", "partitioned", "plan", "restore",
    "standing",
]  # fmt: skip
