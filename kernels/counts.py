"""Bytes of a decode step counted on the emulator, from the kernels' own ISA, at a model's real sizes.

One layer of each kind (full and window) and the head run once, on weights that nobody filled: which addresses are read
does not depend on them. Results are kept by a hash of the sources (kernels, step, compiler and emulator) and FlyDSL's
version, with the hashes of the code that ran, so that changed kernels are counted again.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.errors import Unsupported
from dieplace.kernels.models import ModelShape, model_shape
from dieplace.kernels.step import stages
from dieplace.workload import Operand, Stage, Workload

if TYPE_CHECKING:
    import torch

    from dieplace.kernels.models.config import ModelConfig

ROLES_READ = ("weights", "kv_cache")
_VERSION = 1
# What decides which bytes are read and how they are counted: kernels and step here, compiler and emulator beside them.
_SOURCES = ("flydsl", "layer.py", "head.py", "decode.py", "load.py", "counts.py", "ledger.py", "layout.py")
_LIBRARY_SOURCES = ("codegen", "emulator/isa", "emulator/execution.py", "emulator/hbm.py", "emulator/pages.py")


@dataclass(frozen=True)
class Counts:
    """Distinct bytes read per stage and role, for one layer of each kind; hashes of the code that was run.

    `dies` divides the same bytes by role and home die, over the layers that ran.
    """

    stages: dict[str, dict[str, int]]
    code_hashes: tuple[str, ...]
    instructions: int
    dies: dict[str, dict[str, int]] = field(default_factory=dict)


def counted_stages(
    shape: ModelShape | str,
    *,
    precision: str = "released",
    context_tokens: int = 1024,
    shards: int = 1,
    cache: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Workload:
    """`stages(...)` with the weight and KV bytes that FlyDSL kernels really read, biases and norms included.

    Raises Unsupported where no decode kernel reads a format of the precision (fp8 weights). Takes seconds to a minute
    when the counts are not cached yet; `progress` is then told each stage.
    """
    shape = model_shape(shape) if isinstance(shape, str) else shape
    by_shape = stages(shape, precision=precision, context_tokens=context_tokens, shards=shards)
    counts = counts_of(shape, precision, context_tokens, shards, cache=cache, progress=progress)
    made = tuple(_with_counts(stage, counts.stages.get(stage.name, {})) for stage in by_shape.stages)
    code = hashlib.sha256("".join(counts.code_hashes).encode()).hexdigest()[:12]
    return replace(
        by_shape,
        stages=made,
        bytes_from=f"counted on the emulator, code {code}",
        notes=(*by_shape.notes[:1], "weights and KV bytes counted from executed kernels, biases and norms included"),
    )


def counts_of(
    shape: ModelShape,
    precision: str,
    context_tokens: int,
    shards: int,
    *,
    cache: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Counts:
    """The counts, from the cache where the same kernels were counted before."""
    path = cache_folder() / f"{_key(shape, precision, context_tokens, shards)}.json"
    if cache and (kept := _read(path) or _unwritten.get(path)):
        return kept
    counts = _count(shape, precision, context_tokens, shards, progress or (lambda text: None))
    if cache:
        _keep(path, counts)
    return counts


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dieplace/counts`, by default under `~/.cache` (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dieplace" / "counts"


def config_of(shape: ModelShape) -> ModelConfig:
    """A configuration with one layer of each kind; what decides no byte (rope, eps) is plain."""
    from dieplace.kernels.models.config import FULL, WINDOW, ModelConfig
    from dieplace.kernels.models.rope import Rope

    gpt_oss = shape.family == "gpt_oss"
    kinds = [WINDOW] * bool(shape.window_layers) + [FULL] * (shape.layers > shape.window_layers)
    return ModelConfig(
        family=shape.family,
        layers=len(kinds),
        hidden=shape.hidden,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        tied_head=shape.tied_head,
        eps=1e-5,
        norm_order="before_cast" if gpt_oss else "after_cast",
        layer_types=tuple(kinds),
        window=shape.window,
        ropes=(Rope("default", 10000.0, shape.head_dim),) * len(kinds),
        attention_bias=gpt_oss,
        qk_norm=shape.family == "qwen3",
        sinks=gpt_oss,
        max_positions=131072,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
    )


def _count(
    shape: ModelShape, precision: str, context_tokens: int, shards: int, progress: Callable[[str], None]
) -> Counts:
    from dieplace.kernels.decode import DecodeModel, Settings

    formats = dict(shape.formats(precision))
    unread = sorted({f for f in formats.values() if f not in ("bf16", "mxfp4")})
    if unread:
        raise Unsupported(
            f"{shape.name} {precision}: no decode kernel reads {', '.join(unread)} weights",
            hint="bytes come from the shape",
        )
    progress(f"counting {shape.name} {precision}, {context_tokens} tokens of context")
    settings = Settings(capacity=context_tokens, splits=16, backend="flydsl", strict=True)
    model = DecodeModel(config_of(shape), placement=_placement(shards), formats=formats, settings=settings)
    model.position = context_tokens - 1
    told: set[str] = set()

    def tell(stage: str, layer: int | None) -> None:
        what = stage if layer is None else f"{stage} of a layer ({model.config.layer_types[layer]})"
        if what not in told:
            told.add(what)
            progress(f"counting {what}")

    model.before_call = tell
    ledger = model.step([0]).ledger
    layers = model.config.layers
    total: dict[str, Counter[str]] = {}
    for call in ledger.calls:
        name = {"norm": "boundary"}.get(call.stage, call.stage)
        for kernel in call.kernels:
            for role, (read, _) in kernel.traffic.by_role().items():
                if role in ROLES_READ:
                    total.setdefault(name, Counter())[role] += read.distinct
    once = {"head", "attention", "attention_window"}  # these ran once, the others in every layer
    per_layer = {
        name: {role: n if name in once else n // layers for role, n in roles.items()} for name, roles in total.items()
    }
    hashes = dict.fromkeys(h for call in ledger.calls for h in call.code_hashes)
    instructions = sum(k.instructions for call in ledger.calls for k in call.kernels)
    return Counts(per_layer, tuple(hashes), instructions, ledger.counted_by_role_and_die())


def _placement(shards: int) -> Any:
    """Emulated HBM of one card in DPX/NPS2: shard s on die s, nothing filled, so that no page is ever real."""
    from dieplace.emulator.execution import Session
    from dieplace.emulator.hbm import EmulatedHBM
    from dieplace.kernels.placement import Placement
    from dieplace.kernels.tracing import domains_of

    domains = domains_of("gpu0/p0")
    hbm = EmulatedHBM(domains)

    class Emulated(Placement):
        """Each shard's tensors in its own die's emulated HBM."""

        def allocate(self, shard: int, role: str, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
            return hbm.empty(tuple(shape), dtype, domains[shard].id, role=role, name=name)

        def on(self, shard: int) -> AbstractContextManager[Any]:
            return Session(device=f"gpu0/p{shard}", memory=hbm)

    return Emulated(shards)


def _with_counts(stage: Stage, counted: dict[str, int]) -> Stage:
    kept = tuple(o for o in stage.operands if o.role not in ROLES_READ)
    made = tuple(Operand(f"{stage.name}_{role}", role, n) for role, n in counted.items() if n)
    return replace(stage, operands=(*made, *kept))


def _key(shape: ModelShape, precision: str, context_tokens: int, shards: int) -> str:
    import dieplace

    try:
        flydsl = version("flydsl")
    except PackageNotFoundError:
        flydsl = "absent"
    digest = hashlib.sha256(f"{_VERSION} {shape} {precision} {context_tokens} {shards} {flydsl}".encode())
    library = Path(str(dieplace.__file__)).parent
    for place in (*(Path(__file__).parent / name for name in _SOURCES), *(library / name for name in _LIBRARY_SOURCES)):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


_unwritten: dict[Path, Counts] = {}  # of this process, where the folder cannot be written


def _keep(path: Path, counts: Counts) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"version": _VERSION, **asdict(counts)}), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        _unwritten[path] = counts
        text = f"counts are not kept for the next time: {path.parent}: {error.strerror}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _read(path: Path) -> Counts | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("version") != _VERSION:
            return None
        return Counts(**{**raw, "code_hashes": tuple(raw["code_hashes"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, of another version or damaged: counted again
