"""The strongest evidence of an audit: latency of the memory itself, against memory known to be near and to be far.

Pointer attributes and counters are somebody's word; the time of dependent loads is not (memory of the peer answers some
hundred cycles later wherever it is cached on the way). Every whole window is looked at, not a sample at the front:
tensors that were split were once taken for local by their first 64 MiB. Needs a device clock, which Triton's kernels
read: NVIDIA, and AMD under a ROCm build of torch.

On an MI355X a load that the memory-side cache answers takes 182 ns near and 279 ns far, one that it does not 335 and
433 ns (ROCm/fleet-chiplet-megakernel, aid_remote_hbm): near memory uncached is slower than far memory cached. So both
dies' caches are swept before each walk there, and every load is of the second kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from dieplace.errors import PlacementError, Unsupported
from dieplace.policy import OBJECT_BYTES, peer_domain

if TYPE_CHECKING:
    from dieplace.backends.base import Allocation

CALIBRATION_BYTES = 128 << 20  # beyond the caches of the parts seen (H200: 50 MiB of L2)
SWEEP_BYTES = 512 << 20  # of each die's memory: twice the memory-side cache of a whole MI355X (CDNA 4 white paper)
SMALLEST_WINDOW_BYTES = 4096
HOPS = 128
# Cycles a load in each window of words, by the device of a runtime index.
Walk = Callable[[Any, int, int], tuple[float, ...]]
_BACKEND_OF = {"cuda": "nvidia", "hip": "amd"}  # by the runtime's name


@dataclass(frozen=True)
class Levels:
    """Cycles a load in every window of memory known to be near, and of memory known to be far."""

    near: tuple[float, ...]
    far: tuple[float, ...]

    @property
    def limit(self) -> float:
        """Between the two medians, at equal factors from both."""
        return math.sqrt(median(self.near) * median(self.far))

    @property
    def why_not(self) -> str | None:
        """Why nothing can be told by these levels, or None."""
        if not self.near or not self.far or min(self.near) <= 0:
            return "there are no times to tell by: the chase had no clock"
        if max(self.near) >= self.limit or min(self.far) <= self.limit:
            return (
                f"near memory answers in {min(self.near):.0f} to {max(self.near):.0f} cycles and far memory in"
                f" {min(self.far):.0f} to {max(self.far):.0f}: they cannot be told apart"
            )
        return None


def window_of(nbytes: int) -> int | None:
    """The window to walk in `nbytes`: whole 2 MiB objects, or the largest power of two; None where it is too small."""
    if nbytes < SMALLEST_WINDOW_BYTES:
        return None
    return OBJECT_BYTES if nbytes >= OBJECT_BYTES else int(1 << (nbytes.bit_length() - 1))


def homes_of(cycles: Sequence[float], levels: Levels, nbytes: int, near: str, far: str) -> dict[str, int]:
    """Bytes by domain from each window's cycles a load; what is left over after the last window counts with it."""
    window = window_of(nbytes) or nbytes
    found: dict[str, int] = {}
    for index, value in enumerate(cycles):
        domain = far if value > levels.limit else near
        size = window if index < len(cycles) - 1 else nbytes - window * (len(cycles) - 1)
        found[domain] = found.get(domain, 0) + size
    return found


class Prober:
    """Probes for one audit; calibrates once for each executing device. `walk` stands in for the device in tests."""

    def __init__(self, walk: Walk | None = None) -> None:
        self._walk = walk
        self._levels: dict[str, Levels] = {}
        self._swept: dict[str, list[tuple[Any, Allocation]]] = {}

    def look(self, session: Any, allocation: Allocation, address: int, nbytes: int) -> Mapping[str, int] | None:
        """Bytes by domain of a slice of an allocation, by latency; None where it is too small to tell.

        Unsupported where nothing here can time loads, PlacementError where near and far cannot be told apart.
        """
        why = None if self._walk is not None else no_probe_because(session)
        if why is not None:
            raise Unsupported(f"there is no latency probe here: {why}", hint="audit without probe=True")
        window = window_of(nbytes)
        if window is None:
            return None
        device = session.homes.device(session.request(allocation).device)
        near, far = str(device.domain), peer_domain(session.machine, device).id
        if device.id not in self._levels:
            self._levels[device.id] = self._calibrate(session, device, near, far)
        levels = self._levels[device.id]
        if levels.why_not is not None:
            raise PlacementError(f"nothing can be probed on {device.id}: {levels.why_not}", hint="audit without probe")
        words = _words(session, replace(allocation, address=address), allocation, window * (nbytes // window))
        return homes_of(self._cycles(session, device, words, window), levels, nbytes, near, far)

    def close(self) -> None:
        """Give back what was taken for sweeping."""
        for taken in self._swept.values():
            for session, allocation in taken:
                session.free(allocation)
        self._swept.clear()

    def _calibrate(self, session: Any, device: Any, near: str, far: str) -> Levels:
        if session.runtime.name == "hip":
            self._swept[device.id] = [
                (session, _take(session, device, name, SWEEP_BYTES, movable=name != near)) for name in (near, far)
            ]
        found = []
        for name in (near, far):
            made = _take(session, device, name, CALIBRATION_BYTES, movable=True)
            words = _words(session, made, made, CALIBRATION_BYTES)
            words.random_()
            found.append(self._cycles(session, device, words, OBJECT_BYTES))
            session.free(made)
        return Levels(*found)

    def _cycles(self, session: Any, device: Any, words: Any, window: int) -> tuple[float, ...]:
        index = session.homes.index(device)
        for holder, scratch in self._swept.get(device.id, ()):
            _sweep(_words(holder, scratch, scratch, SWEEP_BYTES), None if self._walk is not None else index)
        return (self._walk or _cycles)(words, window, index)


def no_probe_because(session: Any) -> str | None:
    """Why no load can be timed on a session's devices from this process, or None."""
    backend = _BACKEND_OF.get(getattr(getattr(session, "runtime", None), "name", ""))
    if backend is None:
        return "this backend has no device whose clock could be read"
    from dieplace.backends import torch_build

    return torch_build.why_not(backend)


def _take(session: Any, device: Any, domain: str, nbytes: int, *, movable: bool) -> Allocation:
    made: Allocation = session.allocate(
        session.homes.domain(domain), nbytes, "coarse", device=device, role="activation", movable=movable
    )
    return made


def _sweep(words: Any, index: int | None) -> None:
    """Read all of it once, so that what the caches held before is gone."""
    if index is None:
        words.sum()
        return
    import torch

    from dieplace.probes.triton_stream import programs_for, read

    read(words, torch.empty(programs_for(words.numel()), dtype=torch.int32, device=f"cuda:{index}"), device=index)


def _words(session: Any, at: Allocation, whole: Allocation, nbytes: int) -> Any:
    import torch

    return session.tensor(whole, torch.int32, (nbytes // 4,), at.address - whole.address)


def _cycles(words: Any, window: int, index: int) -> tuple[float, ...]:
    """Cycles a load of each window; a first walk from other lines brings the address translations."""
    import torch

    from dieplace.probes.triton_chase import walk

    out = torch.zeros(words.numel() * 4 // window, 3, dtype=torch.int64, device=f"cuda:{index}")
    torch.cuda.synchronize(index)
    for first in (7919, 1):
        walk(words, out, window_bytes=window, hops=HOPS, device=index, first=first)
    return tuple(cycles / (HOPS - 1) for cycles in out[:, 1].tolist())
