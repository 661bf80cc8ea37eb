"""A whole model as it lies in memory: every layer's weights with all experts, embedding, KV cache and flags.

The step's `Workload` says what one token reads; this says what must be placed. Bytes come from shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dieplace.errors import UsageError
from dieplace.kernels.models import ModelShape, weight_bytes
from dieplace.workload import Workload


@dataclass(frozen=True)
class Piece:
    """One operand of the whole model, over all shards."""

    name: str
    role: str
    nbytes: int

    def shard(self, index: int, shards: int) -> int:
        """Bytes of one shard; shards differ by one byte at most."""
        return self.nbytes * (index + 1) // shards - self.nbytes * index // shards


def pieces(shape: ModelShape, workload: Workload, precision: str) -> tuple[Piece, ...]:
    """Everything to place for `workload` of `shape`, in order: weights layer by layer, KV cache, flags."""
    found: list[Piece] = []
    formats = shape.formats(precision)
    for stage in workload.stages:
        for operand in stage.operands:
            if operand.role == "activation":
                continue
            nbytes = operand.nbytes
            if stage.name == "experts" and operand.role == "weights":
                nbytes = weight_bytes(shape.expert_weights * shape.experts, formats["experts"])
            for layer in range(stage.repeats):
                where = f"{stage.name}.{layer}" if stage.repeats > 1 else stage.name
                found.append(Piece(f"{where}.{operand.name}", operand.role, nbytes))
    if not shape.tied_head:
        embedding = weight_bytes(shape.vocabulary * shape.hidden, "bf16")
        found.insert(0, Piece("embedding", "weights", embedding))
    if not found:
        raise UsageError(f"{workload.name} has nothing to place")
    return tuple(found)


def total_bytes(found: tuple[Piece, ...], role: str | None = None) -> int:
    """Bytes of all pieces, or of one role."""
    return sum(piece.nbytes for piece in found if role in (None, piece.role))
