"""What the device questions do on real GPUs, AMD and NVIDIA alike: memory through the runtime, kernels through torch.

Nothing here judges: each call says what was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from dieplace.backends.dlpack import tensor_at
from dieplace.errors import DieplaceError, Unsupported
from dieplace.experiments.first_light_fill import fill
from dieplace.experiments.first_light_sights import Filled, Remapped, Rounds, Uncached
from dieplace.policy import OBJECT_BYTES

if TYPE_CHECKING:
    from dieplace.machine import Device, Domain, Machine

LINE_WORDS = 32
CHUNK_BYTES = 1 << 30
SPIN_LIMIT = 1 << 24
MARKS = (0x1D1E91AC, 0x2FA57BEE)  # two patterns that share no byte
TICK_NS = {"cuda": 1.0, "hip": 10.0}  # PTX ISA: %globaltimer counts ns; s_memrealtime counts at 100 MHz
Counter = Callable[[Any, tuple[int, ...], int], list[list[int]]]  # words, patterns, runtime index -> rows of counts


@dataclass
class TorchHands:
    """Hands on a machine whose memory group is a device runtime. `count` and `place` are replaced where the runtime's
    memory is host memory."""

    machine: Machine
    count: Counter | None = None
    place: tuple[int, int] | None = None
    session: Any = field(init=False)

    def __post_init__(self) -> None:
        from dieplace.sessions import memory_session

        self.session = memory_session(self.machine, "ask the devices")

    def offers_access(self, one: Device, other: Device) -> bool | None:
        """What the runtime's own call says."""
        index = self.session.homes.index
        found: bool = self.session.runtime.can_access_peer(index(one), index(other))
        return found

    def wrong_bytes(self, executing: Device, domain: Domain, owner: Device, memory_class: str) -> int:
        """Kernels on `executing` write and read 2 MiB in `domain`; bytes that came out wrong there or at the owner."""
        import torch

        n = OBJECT_BYTES // 4
        with ExitStack() as held:
            made = self._held(held, domain, memory_class, executing)
            mine = self._held(held, self._domain(owner), "coarse", owner)
            words = self._view(made.address, n, executing)
            words.fill_(MARKS[0])
            words += torch.arange(n, dtype=torch.int32, device=words.device)
            expected = (torch.arange(n, dtype=torch.int64) + MARKS[0]).to(torch.int32)
            here = words.cpu().clone()
            # The owner's own copy engine reads it, so that a cache of the writer cannot answer for it.
            self.session.runtime.copy(self._index(owner), mine.address, made.address, OBJECT_BYTES)
            there = self._view(mine.address, n, owner).cpu().clone()
        return 4 * int((here != expected).sum() + (there != expected).sum())

    def uncached(self, device: Device) -> Uncached:
        """One uncached request of 2 MiB in the device's own domain, unchecked."""
        runtime, index = self.session.runtime, self._index(device)
        address = runtime.malloc_uncached(index, OBJECT_BYTES)
        try:
            pointer, owner = runtime.pointer(address), runtime.owner(address)
            ratio, why = None, None
            try:
                ratio = self._latency_over_plain(address, device)
            except (DieplaceError, RuntimeError, ImportError) as error:
                why = f"no latency was taken: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        finally:
            runtime.free(index, address)
        is_device = None if owner is None else owner.is_device
        return Uncached(pointer.kind, is_device, None if owner is None else owner.grain, ratio, why)

    def rounds(
        self, writer: Device, reader: Device, *, readers: int, rounds: int, memory_class: str, scope: str
    ) -> Rounds:
        """A flag in the reader's domain, acknowledgements in the writer's; two launches where these differ."""
        import torch

        from dieplace.kernels import registry

        both = writer.id != reader.id
        with ExitStack() as held:
            flag = self._held(held, self._domain(reader), memory_class, writer)
            acks = self._held(held, self._domain(writer), memory_class, reader)
            stamps = {d.id: self._zeros((1 + readers, rounds), torch.int64, d) for d in (writer, reader)}
            places = {d.id: self._zeros((1 + readers,), torch.int32, d) for d in (writer, reader)}
            self._view(flag.address, OBJECT_BYTES // 4, reader).zero_()
            self._view(acks.address, OBJECT_BYTES // 4, writer).zero_()

            def launch(device: Device, party: int, parties: int, limit: int) -> None:
                operands = {
                    "flag": self._view(flag.address, LINE_WORDS, device),
                    "acks": self._view(acks.address, readers * LINE_WORDS, device),
                    "stamps": stamps[device.id],
                    "xcc": places[device.id],
                }
                attrs = {"first": 1, "spin_limit": limit, "party": party, "parties": parties, "scope": scope}
                with self._executing(device):
                    registry.run("flag_visibility", operands, attrs, backend=self._kernels, strict=True)

            order = [(reader, 1, readers), (writer, 0, 1)] if both else [(writer, 0, readers + 1)]
            for device, party, parties in order:  # compiled before anybody waits for the other
                launch(device, party, parties, 1)
                self._wait(device)
            self._view(flag.address, OBJECT_BYTES // 4, reader).zero_()
            self._view(acks.address, OBJECT_BYTES // 4, writer).zero_()
            for one in stamps.values():
                one.zero_()
            for device in (reader, writer):
                self._wait(device)
            for device, party, parties in order:
                launch(device, party, parties, SPIN_LIMIT)
            for device in (reader, writer):
                self._wait(device)
            ticks = stamps[writer.id][0].cpu()
            seen = tuple(int(n) for n in (stamps[reader.id][1:] != 0).sum(dim=1).cpu())
            step = (ticks[1:] - ticks[:-1]).tolist() if bool((ticks != 0).all()) else []
            scale = TICK_NS.get(self.session.runtime.name, 1.0)
            where = tuple(sorted({int(x) for x in places[reader.id][1:].cpu()}))
            return Rounds(rounds, seen, tuple(value * scale for value in step), where)

    def remap(self, device: Device) -> Remapped:
        """Give a virtual range other memory between two kernels, without waiting for the device as a whole."""
        runtime, index, nbytes = self.session.runtime, self._index(device), OBJECT_BYTES
        objects = [runtime.create(index, nbytes) for _ in MARKS]
        address = runtime.reserve(nbytes, OBJECT_BYTES)
        mapped: list[int] = []

        def give(which: int) -> None:
            if mapped:
                runtime.unmap(address, nbytes)
                mapped.clear()
            runtime.map(address, nbytes, objects[which])
            mapped.append(which)
            runtime.set_access(address, nbytes, (index,))

        try:
            for which in (1, 0):
                give(which)
                self._view(address, nbytes // 4, device).fill_(MARKS[which])
                self._wait(device)
            words = self._view(address, nbytes // 4, device)
            for _ in range(3):
                before = self._counted(words, device)
            with self._busy(device) as still_busy:
                before = self._counted(words, device)
                give(1)
                after = self._counted(words, device)
                busy = still_busy()
            return Remapped(
                nbytes // 4, len(after), sum(row[0] for row in after), sum(row[1] for row in after),
                sum(row[0] for row in before), busy,
            )  # fmt: skip
        finally:
            self._wait(device)
            if mapped:
                runtime.unmap(address, nbytes)
            for handle in objects:
                runtime.release(handle)
            runtime.unreserve(address, nbytes)

    def launch_ns(self, device: Device) -> tuple[float, float]:
        """(a kernel inside a captured graph, a kernel launched from Python), in ns: the slope over many kernels."""
        import torch

        from dieplace.backends import torch_timing as timing

        index = self._index(device)
        one = torch.zeros(1, device=f"cuda:{index}")

        def slope(make: Callable[..., Any]) -> float:
            few, many = (make([lambda: (one.add_(1), None)[1]] * n, index) for n in (64, 512))
            times = [(timing.time_once(many) * 512 - timing.time_once(few) * 64) / (512 - 64) for _ in range(15)]
            return median(times)

        return slope(timing.capture), slope(timing.uncaptured)

    def fill(self, device: Device) -> Filled:
        """Take the device's own domain in pieces until it is full, and give all of it back."""
        domain = self._domain(device)
        limit = domain.total_bytes
        piece = CHUNK_BYTES if limit is None or limit > 16 * CHUNK_BYTES else max(OBJECT_BYTES, limit // 16)

        def take(nbytes: int) -> Any:
            return self._allocate(domain, nbytes, "coarse", device, movable=True)

        return fill(limit, piece, take, self.session.free)

    @property
    def _kernels(self) -> str:
        # The question is about sc1 polls, which FlyDSL's kernel has and Triton's volatile loads have not.
        return "triton" if self.session.runtime.name == "cuda" else "flydsl"

    def _allocate(
        self, domain: Domain, nbytes: int, memory_class: str, device: Device, *, movable: bool | None = None
    ) -> Any:
        far = domain.id != device.domain
        wanted = (far and memory_class == "coarse") if movable is None else movable
        return self.session.allocate(
            domain, nbytes, memory_class, device=device, role="activation", name="first light", movable=wanted
        )

    def _held(self, held: ExitStack, domain: Domain, memory_class: str, device: Device) -> Any:
        """2 MiB that are given back with `held`, also where what comes after fails."""
        made = self._allocate(domain, OBJECT_BYTES, memory_class, device)
        held.callback(self.session.free, made)
        return made

    def _latency_over_plain(self, address: int, device: Device) -> float:
        import torch

        from dieplace.probes.triton_chase import NO_CLOCKS, chain, chase, clock_kind

        if not torch.cuda.is_available() or clock_kind() == NO_CLOCKS:
            raise Unsupported("there is no device clock here")
        index, nbytes = self._index(device), 64 << 10
        plain = chain(nbytes, f"cuda:{index}", seed=1)
        uncached = self._view(address, nbytes // 4, device)
        uncached.copy_(plain)
        out = torch.zeros(3, dtype=torch.int64, device=plain.device)

        def cycles(words: Any) -> float:
            taken = []
            for _ in range(9):
                chase(words, out, start=0, hops=1024, device=index)
                taken.append(int(out[1]))
            return median(taken)

        return cycles(uncached) / cycles(plain)

    def _counted(self, words: Any, device: Device) -> list[list[int]]:
        from dieplace.experiments.first_light_count import count

        counter = self.count or count
        return counter(words, MARKS, self._index(device))

    @contextmanager
    def _busy(self, device: Device) -> Iterator[Callable[[], bool]]:
        """Other work on the device meanwhile; yields what tells whether it still runs. None without torch's devices."""
        import torch

        if self.place is not None or not torch.cuda.is_available():
            yield lambda: False
            return
        index = self._index(device)
        with torch.cuda.device(index):
            stream = torch.cuda.Stream(device=index)
            done = torch.cuda.Event()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(4_000_000_000)  # about two seconds of a spinning thread
                done.record(stream)
            try:
                yield lambda: not done.query()
            finally:
                with suppress(RuntimeError):
                    stream.synchronize()

    def _view(self, address: int, words: int, device: Device) -> Any:
        import torch

        kind, index = self.place or (self.session.runtime.tensor_kind, self._index(device))
        return tensor_at(address, 4 * words, torch.int32, (words,), kind, index, lambda: None)

    def _zeros(self, shape: tuple[int, ...], dtype: Any, device: Device) -> Any:
        import torch

        return torch.zeros(shape, dtype=dtype, device="cpu" if self.place else f"cuda:{self._index(device)}")

    def _executing(self, device: Device) -> Any:
        import torch

        return nullcontext() if self.place else torch.cuda.device(self._index(device))

    def _wait(self, device: Device) -> None:
        self.session.runtime.synchronize(self._index(device))

    def _index(self, device: Device) -> int:
        found: int = self.session.homes.index(device)
        return found

    def _domain(self, device: Device) -> Domain:
        return self.machine.domain(str(device.domain))
