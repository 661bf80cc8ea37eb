"""Where a rig's buffers come from: torch's own allocator on each device, or the memory group's placed buffers.

Words are int32 of random bits; a chain is words in which one closed path visits every line. `reader` executes, the
bytes lie in the memory of `home`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dieplace.backends.base import require
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.policy import Policy

WORDS_BYTES = 1 << 30


class Buffers(Protocol):
    """Buffers by reader, home and name, each made once."""

    def open(self, readers: Sequence[str]) -> None: ...
    def device(self, reader: str) -> str: ...  # torch's name of it
    def words(self, reader: str, home: str, name: str) -> Any: ...
    def chain(self, reader: str, home: str, nbytes: int, *, seed: int) -> Any: ...
    def facts(self) -> dict[str, Any]: ...
    def clear(self) -> None: ...


class TorchBuffers:
    """torch's own tensors on the home's device; readers reach them by peer access, which a copy each way enables."""

    def __init__(self, index: Callable[[str], int], nbytes: int = WORDS_BYTES) -> None:
        self._index, self._nbytes = index, nbytes
        self._made: dict[tuple[str, str, int], Any] = {}

    def open(self, readers: Sequence[str]) -> None:
        """Enable access between all readers: torch enables it from a to b in a copy between them."""
        import torch

        for a in readers:
            for b in readers:
                torch.ones(1, device=self.device(a)).to(self.device(b))

    def device(self, reader: str) -> str:
        """torch's name of a device."""
        return f"cuda:{self._index(reader)}"

    def words(self, reader: str, home: str, name: str) -> Any:
        """Random words on the home's device, shared by all readers."""
        return self._once((name, home, self._nbytes), lambda: random_words(self.device(home), self._nbytes))

    def chain(self, reader: str, home: str, nbytes: int, *, seed: int) -> Any:
        """A chain of `nbytes` on the home's device."""
        from dieplace.probes.triton_chase import chain

        return self._once(("chain", home, nbytes), lambda: chain(nbytes, self.device(home), seed=seed))

    def facts(self) -> dict[str, Any]:
        """Nothing to tell: torch keeps no books of homes."""
        return {}

    def clear(self) -> None:
        """Forget all buffers."""
        self._made.clear()

    def _once(self, key: tuple[str, str, int], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class PlacedBuffers:
    """Buffers of the memory group: tensors of the reader's device whose bytes lie in the home's domain."""

    def __init__(self, machine: Machine, nbytes: int = WORDS_BYTES) -> None:
        self._machine, self._nbytes = machine, nbytes
        self._made: dict[tuple[str, str, str, int], Buffer] = {}

    def open(self, readers: Sequence[str]) -> None:
        """Nothing to do: each allocation grants access by itself."""

    def device(self, reader: str) -> str:
        """torch's name of a device, by the memory group."""
        session = self._machine.require_session("measure")
        name: str = require(session, "memory").memory.torch_device(self._machine.device(reader))
        return name

    def words(self, reader: str, home: str, name: str) -> Any:
        """Random words in the home's domain, for one reader."""
        return self._view(reader, home, name, self._nbytes, lambda device: random_words(device, self._nbytes))

    def chain(self, reader: str, home: str, nbytes: int, *, seed: int) -> Any:
        """A chain of `nbytes` in the home's domain."""
        from dieplace.probes.triton_chase import chain

        return self._view(reader, home, "chain", nbytes, lambda device: chain(nbytes, device, seed=seed))

    def facts(self) -> dict[str, Any]:
        """What the audit says of them, so that a reader need not believe the names of the arms."""
        from dieplace.residency import audit

        found = audit(*self._made.values())
        return {
            "buffers": {
                "placed_by": "the memory group",
                "evidence": found.evidence,
                "misplaced_bytes": sum(item.misplaced_bytes for item in found.items),
                "bytes_by_domain": found.bytes_by_domain(),
            }
        }

    def clear(self) -> None:
        """Free all buffers."""
        for buffer in self._made.values():
            buffer.free()
        self._made.clear()

    def _view(self, reader: str, home: str, name: str, nbytes: int, contents: Callable[[Any], Any]) -> Any:
        import torch

        key = (reader, home, name, nbytes)
        if key not in self._made:
            domain = self._machine.device(home).domain
            policy = Policy.local() if home == reader else Policy.on(str(domain))
            made = self._machine.allocate(nbytes, device=reader, policy=policy, role="activation", name=name)
            words = made.tensor.view(torch.int32)
            words.copy_(contents(words.device))
            self._made[key] = made
        return self._made[key].tensor.view(torch.int32)


def random_words(device: Any, nbytes: int) -> Any:
    """int32 words over the whole range."""
    import torch

    return torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device=device)
