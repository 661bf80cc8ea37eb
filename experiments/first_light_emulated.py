"""What the device questions do on the emulated card: the same gfx950 kernels, run by the interpreter over two dies.

It shows that the questions and their kernels work. An answer here says nothing of hardware: the emulator answers as it
was written to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dieplace.experiments.first_light_fill import fill
from dieplace.experiments.first_light_hands import CHUNK_BYTES, LINE_WORDS
from dieplace.experiments.first_light_questions import NotAsked
from dieplace.experiments.first_light_sights import Filled, Remapped, Rounds, Uncached

if TYPE_CHECKING:
    from dieplace.machine import Device, Domain, Machine

BYTES = 64 << 10
SPIN_LIMIT = 200_000
SEEDS = (1, 2, 3)


@dataclass
class EmulatedHands:
    """Hands on an emulated machine."""

    machine: Machine
    memory: Any = field(init=False)

    def __post_init__(self) -> None:
        from dieplace.sessions import memory_session

        self.memory = memory_session(self.machine, "ask the devices")

    def offers_access(self, one: Device, other: Device) -> bool | None:
        """The emulator has no runtime call to ask."""
        return None

    def wrong_bytes(self, executing: Device, domain: Domain, owner: Device, memory_class: str) -> int:
        """A kernel on `executing` reads 64 KiB of `domain`, and writes what it found back into it."""
        import torch

        from dieplace.emulator.execution import run
        from dieplace.probes.stream import THREADS, build_stream

        hbm = self.memory.hbm
        options = {"role": "activation", "memory_class": memory_class}
        source = hbm.empty((BYTES // 4,), torch.int32, domain.id, **options)
        source.copy_(torch.randint(-(2**31), 2**31, (BYTES // 4,), generator=torch.Generator().manual_seed(1)))
        out = hbm.empty((THREADS,), torch.int32, domain.id, **options).zero_()
        run(build_stream(1), source, out, BYTES // 16, 1, device=executing, memory=hbm)
        folded, expected = (_fold(words) for words in (out, source))
        return 0 if folded == expected else BYTES

    def uncached(self, device: Device) -> Uncached:
        """The emulator gives what was asked, so nothing can be learnt from it."""
        raise NotAsked("the emulator gives the class that was asked: only a ROCm build can answer otherwise")

    def rounds(
        self, writer: Device, reader: Device, *, readers: int, rounds: int, memory_class: str, scope: str
    ) -> Rounds:
        """A flag in the reader's domain under several interleavings; no times, for the emulator counts steps."""
        seen: list[int] = []
        places: set[int] = set()
        for seed in SEEDS:
            stamps, where = self._one(writer, reader, readers, rounds, memory_class, scope, seed)
            seen += [int(n) for n in (stamps[1:] != 0).sum(dim=1)]
            places |= {int(x) for x in where[1:]}
        return Rounds(rounds, tuple(seen), (), tuple(sorted(places)))

    def _one(
        self, writer: Device, reader: Device, readers: int, rounds: int, memory_class: str, scope: str, seed: int
    ) -> tuple[Any, Any]:
        import torch

        from dieplace.emulator.execution import concurrent, run
        from dieplace.kernels.flydsl.visibility import build_flag_visibility

        hbm = self.memory.hbm

        def zeros(domain: str | None, shape: tuple[int, ...], dtype: Any, kind: str = "coarse") -> Any:
            return hbm.empty(shape, dtype, str(domain), role="sync_flag", memory_class=kind).zero_()

        flag = zeros(reader.domain, (LINE_WORDS,), torch.int32, memory_class)
        acks = zeros(writer.domain, (readers * LINE_WORDS,), torch.int32, memory_class)
        stamps = zeros(writer.domain, (1 + readers, rounds), torch.int64)
        where = zeros(writer.domain, (1 + readers,), torch.int32)
        common = (flag, acks, stamps, where, 1, rounds, readers, SPIN_LIMIT)
        launcher, options = build_flag_visibility(scope), {"memory": hbm, "memory_options": {"patience": 1000}}
        with concurrent(seed=seed):
            if writer.id == reader.id:
                run(launcher, *common, 0, readers + 1, device=writer, **options)
            else:
                run(launcher, *common, 1, readers, device=reader, **options)
                run(launcher, *common, 0, 1, device=writer, **options)
        return stamps, where

    def remap(self, device: Device) -> Remapped:
        """Every launch begins with empty caches here."""
        raise NotAsked("the emulator begins every launch with empty caches, so no line could be stale")

    def launch_ns(self, device: Device) -> tuple[float, float]:
        """Launches cost nothing here."""
        raise NotAsked("launching costs the emulator's clock nothing: it would tell its own input")

    def fill(self, device: Device) -> Filled:
        """Take the device's own domain in pieces until it is full; the memory is sparse."""
        home = self.machine.domain(str(device.domain))

        def take(nbytes: int) -> Any:
            return self.memory.allocate(home, nbytes, "coarse", device=device)

        return fill(home.total_bytes, 16 * CHUNK_BYTES, take, self.memory.free)


def _fold(words: Any) -> int:
    """The exclusive or of all words."""
    import numpy as np

    return int(np.bitwise_xor.reduce(words.numpy()))
