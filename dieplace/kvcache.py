"""A KV cache on a chosen die: contiguous or paged, one buffer a layer, with the views that decode kernels take.

One sequence a cache, as in single-request decode. K and V of a layer are `(pages, page_tokens, kv_heads, head_dim)`; a
contiguous cache is one page. Position `p` lies at flat slot `page_table[p // page_tokens] * page_tokens + p %
page_tokens`; slot -1 stands for "not stored".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dieplace.errors import PlacementError, UsageError
from dieplace.machine import Device, Machine
from dieplace.memory import Buffer, allocate
from dieplace.policy import Policy

if TYPE_CHECKING:
    import torch

# Short words of kernel and model files, beside torch's own names.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}


class KVCache:
    """Keys and values of one sequence, for `layers` layers of up to `tokens` positions.

    `page_tokens` None is contiguous. Raises DomainFull with nothing left behind, UsageError for sizes that cannot be.
    """

    def __init__(
        self,
        machine: Machine,
        device: Device | str,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        dtype: str = "bf16",
        page_tokens: int | None = None,
        policy: Policy | str = "local",
        name: str = "kv",
    ) -> None:
        import torch

        for what, number in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim), ("tokens", tokens)):
            if number < 1:
                raise UsageError(f"a KV cache of {number} {what} cannot be")
        if page_tokens is not None and page_tokens < 1:
            raise UsageError(f"a page of {page_tokens} tokens cannot be", hint="leave it out for a contiguous cache")
        self.page_tokens = page_tokens or tokens
        self.pages = -(-tokens // self.page_tokens)
        self.capacity = tokens
        self.length = 0
        self.page_table = torch.full((self.pages,), -1, dtype=torch.int32)
        self._free_pages = list(range(self.pages - 1, -1, -1))
        self._shape = (2, self.pages, self.page_tokens, kv_heads, head_dim)
        self._buffers: list[Buffer] = []
        try:
            for layer in range(layers):
                self._buffers.append(
                    allocate(
                        machine,
                        self._shape,
                        device=device,
                        policy=policy,
                        role="kv_cache",
                        dtype=DTYPES.get(dtype, dtype),
                        name=f"{name}.{layer}",
                        movable=True,
                    )
                )
        except Exception:
            self.free()  # nothing half-allocated
            raise
        self._layers = [buffer.tensor for buffer in self._buffers]

    @property
    def layers(self) -> int:
        return len(self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes asked for, all layers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def keys(self, layer: int) -> torch.Tensor:
        """K of a layer, (pages, page_tokens, kv_heads, head_dim)."""
        return self._layers[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """V of a layer, (pages, page_tokens, kv_heads, head_dim)."""
        return self._layers[layer][1]

    def reserve(self, count: int) -> torch.Tensor:
        """Make room for the next `count` positions of all layers and return their flat slots, (count,) int32."""
        import torch

        if count < 0 or self.length + count > self.capacity:
            raise PlacementError(
                f"{self.length} tokens and {count} more do not fit a cache of {self.capacity}",
                hint="make a larger cache, or truncate() it",
            )
        positions = torch.arange(self.length, self.length + count)
        for page in range(-(-self.length // self.page_tokens), -(-(self.length + count) // self.page_tokens)):
            self.page_table[page] = self._free_pages.pop()
        self.length += count
        return self.slots(positions)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Flat slots of positions, int32; -1 for positions that are not stored."""
        import torch

        stored = (positions >= 0) & (positions < self.length)
        safe = torch.where(stored, positions, 0)
        page = self.page_table[(safe // self.page_tokens).long()].long()
        return torch.where(stored, page * self.page_tokens + safe % self.page_tokens, -1).to(torch.int32)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows of K and V, (count, kv_heads, head_dim), at flat slots; rows at slot -1 are left out."""
        wanted = (len(slots), *self._shape[3:])
        if tuple(keys.shape) != wanted or tuple(values.shape) != wanted:
            raise UsageError(f"rows of shape {tuple(keys.shape)} and {tuple(values.shape)} are not {wanted}")
        if (slots >= self.pages * self.page_tokens).any():
            raise UsageError(f"a slot lies beyond the cache's {self.pages * self.page_tokens}")
        kept = slots >= 0  # a negative index would wrap to the last slot
        target = slots[kept].long()
        for part, rows in ((0, keys), (1, values)):
            self._layers[layer][part].flatten(0, 1)[target] = rows[kept].to(self._layers[layer].dtype)

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the stored positions in order, each (length, kv_heads, head_dim): copies, for references."""
        import torch

        slots = self.slots(torch.arange(self.length)).long()
        return self.keys(layer).flatten(0, 1)[slots], self.values(layer).flatten(0, 1)[slots]

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on, as after a rejected draft; their pages are free again."""
        if not 0 <= length <= self.length:
            raise UsageError(f"cannot truncate {self.length} tokens to {length}")
        for page in range(-(-length // self.page_tokens), -(-self.length // self.page_tokens)):
            self._free_pages.append(int(self.page_table[page]))
            self.page_table[page] = -1
        self.length = length

    def audited(self) -> Sequence[Buffer]:
        """The buffers, for `audit`."""
        return tuple(self._buffers)

    def move(self, policy: Policy | str) -> None:
        """Give every layer another home under the same addresses; on DomainFull those moved go back."""
        moved: list[tuple[Buffer, Policy]] = []
        try:
            for buffer in self._buffers:
                before = buffer.policy
                buffer.move(policy)
                moved.append((buffer, before))
        except Exception:
            for buffer, before in moved:
                buffer.move(before)
            raise

    def __repr__(self) -> str:
        kind = "contiguous" if self.pages == 1 else f"{self.pages} pages of {self.page_tokens} tokens"
        homes = ", ".join(dict.fromkeys(home for buffer in self._buffers for home in buffer.requested))
        tokens = f"{self.length} of {self.capacity} tokens"
        return f"KVCache({self.layers} layers, {tokens}, {kind}, {self.nbytes:,} bytes, {homes})"

    def free(self) -> None:
        """Give all layers back."""
        for buffer in self._buffers:
            buffer.free()
