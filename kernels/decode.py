"""The decode step that runs: a configuration, weights and a placement become op calls, token by token.

    model = open_model("folder/of/a/checkpoint", shards=2)
    step = model.step([token])             # logits (1, vocabulary), greedy token, bytes by role and die

Shards are tensor-parallel halves. Each shard works on its own copy of the hidden state; partial sums cross by packed
hand-offs (32-bit value and 32-bit tag in one word), after attention and after the experts or the MLP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dieplace.errors import KernelFault, UsageError
from dieplace.kernels import registry
from dieplace.kernels.head import run_head
from dieplace.kernels.layer import run_layer
from dieplace.kernels.ledger import Executed, Ledger, Touched
from dieplace.kernels.load import Weights, head_is_tied
from dieplace.kernels.models.config import ModelConfig, read_config
from dieplace.kernels.models.rope import tables
from dieplace.kernels.placement import Placement
from dieplace.workload import Handoff, Workload

RELEASED: Mapping[str, str] = {"qkv": "bf16", "o_proj": "bf16", "mlp": "bf16", "head": "bf16"}
DENSE_MXFP4: Mapping[str, str] = {"qkv": "mxfp4", "o_proj": "mxfp4", "mlp": "mxfp4", "head": "bf16"}


@dataclass(frozen=True)
class Settings:
    """Choices that change speed, never results beyond rounding.

    `page` 0 is one contiguous cache, else tokens a page; `splits` of the context in attention; `mxfp8` runs MXFP4
    matrices on the scaled matrix instruction with MXFP8 activations (which does round the activations further).
    """

    capacity: int = 256
    page: int = 0
    splits: int = 4
    mxfp8: bool = False
    backend: str = "reference"
    strict: bool = False


def open_model(
    folder: str | os.PathLike[str],
    *,
    placement: Placement | None = None,
    shards: int = 1,
    formats: Mapping[str, str] = RELEASED,
    settings: Settings | None = None,
) -> DecodeModel:
    """The model of a Hugging Face folder (`config.json` and safetensors files), its weights streamed into place."""
    config = read_config(folder)
    tied = head_is_tied(config, folder)
    name = Path(folder).resolve().name
    model = DecodeModel(
        config, placement=placement, shards=shards, formats=formats, tied=tied, settings=settings, name=name
    )
    model.weights.load(folder)
    return model


@dataclass(frozen=True)
class StepResult:
    """One step: logits (T, vocabulary) fp32, the greedy tokens (T), non-finite router logits, and what was touched.

    NaN loses to any number, in the router and in the head: the step goes on and the counts say so. `nonfinite` is over
    all layers, of one shard (every shard routes alike).
    """

    logits: Tensor
    tokens: tuple[int, ...]
    nonfinite: int
    ledger: Ledger
    workload: Workload

    @property
    def nonfinite_logits(self) -> int:
        """Logits of the head that are NaN or infinite."""
        return int((~torch.isfinite(self.logits)).sum())


@dataclass
class ShardState:
    """What one shard keeps between ops of a step: caches by layer, tables, mailboxes, scratch by name and shape."""

    k_caches: list[Tensor]
    v_caches: list[Tensor]
    ropes: dict[Any, tuple[Tensor, Tensor]]
    scratch: dict[Any, Tensor] = field(default_factory=dict)


class DecodeModel:
    """A model with its weights and caches in place; `step` runs 1 to 8 tokens of one sequence."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        placement: Placement | None = None,
        shards: int = 1,
        formats: Mapping[str, str] = RELEASED,
        tied: bool | None = None,
        settings: Settings | None = None,
        name: str = "model",
    ) -> None:
        self.config, self.name = config, name
        self.settings = settings or Settings()
        self.placement = placement or Placement(shards)
        self.shards = self.placement.shards
        self.tied = config.tied_head if tied is None else tied
        self.weights = Weights(config, self.placement, formats, self.tied)
        self.position = 0
        self.tag = 0
        self.nonfinite = 0
        self.ledger = Ledger()
        self.before_call: Callable[[str, int | None], None] = lambda stage, layer: None  # for progress
        self.page = self.settings.page or self.settings.capacity
        self.pages = -(-self.settings.capacity // self.page)
        self.page_tables = [
            self._new(shard, "activation", (self.pages,), torch.int32, "page_table") for shard in range(self.shards)
        ]
        for table in self.page_tables:
            table.copy_(torch.arange(self.pages, dtype=torch.int32))
        self.states = [self._state(shard) for shard in range(self.shards)]

    def step(self, tokens: Sequence[int]) -> StepResult:
        """Decode the next tokens of the sequence: logits after each, and the greedy choice; advances the position."""
        self._check_tokens(tokens)
        self.ledger = Ledger()
        count = len(tokens)
        self.nonfinite = 0
        hidden = [self._embed(shard, tokens) for shard in range(self.shards)]
        residual: list[Tensor | None] = [None] * self.shards
        for layer in range(self.config.layers):
            hidden, residual = run_layer(self, layer, hidden, residual)
        logits, chosen = run_head(self, hidden, residual)
        self.position += count
        return StepResult(logits, chosen, self.nonfinite, self.ledger, self._workload(count))

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` positions: rejected tokens of a verify round."""
        if not 0 <= tokens <= self.position:
            raise UsageError(f"cannot drop {tokens} of {self.position} tokens")
        self.position -= tokens

    def call(
        self,
        stage: str,
        layer: int | None,
        shard: int,
        op: str,
        operands: Mapping[str, Any],
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run one op on one shard's device and note what it touched."""
        self.before_call(stage, layer)
        checked = registry.check_call(op, operands, attrs)
        touched = tuple(self._touched(checked, name, n) for name, n in registry.bytes_by_operand(checked).items())
        with self.placement.on(shard) as session:
            ran = registry.run_call(checked, backend=self.settings.backend, strict=self.settings.strict)
        records = getattr(session, "records", ())
        kernels = tuple(k for record in records for k in record.kernels)
        hashes = tuple(record.code_hash for record in records if record.code_hash)
        self.ledger.calls.append(Executed(stage, layer, shard, op, ran, touched, kernels, hashes))

    def scratch(
        self, shard: int, name: str, shape: Sequence[int], dtype: torch.dtype, role: str = "activation"
    ) -> Tensor:
        """A buffer that lives as long as the model, one per name, shape and dtype; zero at first."""
        key = (name, tuple(shape), dtype)
        state = self.states[shard]
        if key not in state.scratch:
            state.scratch[key] = self._new(shard, role, shape, dtype, name).zero_()
        return state.scratch[key]

    def exchange(self, stage: str, layer: int | None, name: str, partials: Sequence[Tensor]) -> list[Tensor]:
        """Sum the shards' fp32 partials (T, N) into bf16 on each shard, by packed hand-offs."""
        self.tag += 1
        boxes = [
            self.scratch(s, f"{name}_mailbox", (p.numel(),), torch.int64, "sync_flag") for s, p in enumerate(partials)
        ]
        for shard, partial in enumerate(partials):
            peer = 1 - shard
            self.call(
                stage, layer, shard, "handoff_put", {"x": partial.view(-1), "mailbox": boxes[peer]}, {"tag": self.tag}
            )
        sums = []
        for shard, partial in enumerate(partials):
            out = self.scratch(shard, f"{name}_sum", partial.shape, torch.bfloat16)
            status = self.scratch(shard, f"{name}_status", (2,), torch.int32)
            operands = {"own": partial.view(-1), "mailbox": boxes[shard], "out": out.view(-1), "status": status}
            self.call(stage, layer, shard, "handoff_sum", operands, {"tag": self.tag})
            self._check_status(shard, name, status)
            sums.append(out)
        self.ledger.handoffs.append((stage, Handoff(name, "packed", partials[0].numel() * 4)))
        return sums

    def _check_status(self, shard: int, name: str, status: Tensor) -> None:
        timeouts, last = status.tolist()
        if timeouts:
            status.zero_()
            raise KernelFault(
                f"hand-off {name} on shard {shard}: {timeouts} word(s) never came with tag {self.tag}, last tag {last}"
            )

    def _embed(self, shard: int, tokens: Sequence[int]) -> Tensor:
        """Rows of the embedding; its rows are divided over the shards, each copies what it needs."""
        rows = self.config.vocabulary // self.shards
        out = self.scratch(shard, "hidden", (len(tokens), self.config.hidden), torch.bfloat16)
        places: dict[str, int] = {}
        for t, token in enumerate(tokens):
            table = self.weights.get(token // rows, "embed")
            assert table is not None
            out[t].copy_(table[token % rows])
            nbytes = self.config.hidden * table.element_size()
            for place, n in self.placement.bytes_by_place(table, nbytes).items():
                places[place] = places.get(place, 0) + n
        operand = Touched("table", "weights", sum(places.values()), False, places)
        self.ledger.calls.append(Executed("embed", None, shard, "embed", "torch", (operand,)))
        return out

    def norm(
        self, stage: str, layer: int | None, shard: int, weight: str, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm of x + residual; returns the normed rows and the new residual (x itself without one)."""
        out = self.scratch(shard, "normed", x.shape, torch.bfloat16)
        kind = weight.rpartition(".")[2]  # the two norms of a layer hand each other's sum on: a buffer each
        total = None if residual is None else self.scratch(shard, f"residual_{kind}", x.shape, torch.bfloat16)
        operands = {"x": x, "residual": residual, "weight": self.weights.get(shard, weight), "out": out}
        operands["residual_out"] = total
        attrs = {"eps": self.config.eps, "order": self.config.norm_order}
        self.call(stage, layer, shard, "rmsnorm", operands, attrs)
        return out, x if total is None else total

    def _state(self, shard: int) -> ShardState:
        c = self.config
        shape = (self.pages, self.page, c.kv_heads // self.shards, c.head_dim)
        caches = [
            [self._new(shard, "kv_cache", shape, torch.bfloat16, f"layers.{n}.{side}") for n in range(c.layers)]
            for side in ("k", "v")
        ]
        ropes = {}
        for rope in dict.fromkeys(c.ropes):
            made = tables(rope, self.settings.capacity)
            pair = tuple(self._new(shard, "activation", t.shape, t.dtype, "rope").copy_(t) for t in made)
            ropes[rope] = (pair[0], pair[1])
        return ShardState(caches[0], caches[1], ropes)

    def _new(self, shard: int, role: str, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
        return self.placement.allocate(shard, role, tuple(shape), dtype, name)

    def _touched(self, call: registry.Call, name: str, nbytes: int) -> Touched:
        spec, tensor = call.op.operand(name), call.operands[name]
        assert tensor is not None
        places = self.placement.bytes_by_place(tensor, nbytes)
        return Touched(name, spec.role, nbytes, spec.use != registry.INPUT, places)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not 1 <= len(tokens) <= 8:
            raise UsageError(f"a step takes 1 to 8 tokens, not {len(tokens)}")
        bad = [t for t in tokens if not 0 <= t < self.config.vocabulary]
        if bad:
            raise UsageError(f"token {bad[0]} is not within the vocabulary of {self.config.vocabulary}")
        if self.position + len(tokens) > self.settings.capacity:
            raise UsageError(
                f"{self.position + len(tokens)} tokens do not fit a cache of {self.settings.capacity}",
                hint="make the model with Settings(capacity=...)",
            )

    def _workload(self, count: int) -> Workload:
        return self.ledger.workload(
            self.name, shards=self.shards, tokens=count, context_tokens=self.position, layers=self.config.layers
        )
