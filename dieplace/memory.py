"""Placed memory: buffers by role and policy, and the two context managers in which torch factories land on a die.

Buffers are made by `machine.allocate(...)`; `device.local(role=)` and `device.peer(role=)` place what torch allocates
inside them on this thread. `peer` is the deliberate misplacement: tensors stay usable by the executing device, only
their backing lies on the other die.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dieplace.backends.base import Allocation, Location
from dieplace.errors import DomainFull, PlacementError, Unsupported, UsageError
from dieplace.machine import Device, Machine
from dieplace.policy import Policy, Resolved, expected_bytes, resolve
from dieplace.sessions import memory_session as memory_session
from dieplace.workload import ROLES

if TYPE_CHECKING:
    import torch

    from dieplace.sharing import Exported

# Flags are polled across dies: only the extended-scope class cannot go stale there (Linux,
# gmc_v9_0.c: such lines of a peer are uncached).
CLASS_OF_ROLE = {"weights": "coarse", "kv_cache": "coarse", "activation": "coarse", "sync_flag": "uncached"}


class Buffer:
    """One allocation with its role and the policy it was asked under; frees itself when dropped.

    `tensor` is a view of all bytes; views keep the memory alive after `free()`.
    """

    def __init__(
        self,
        machine: Machine,
        session: Any,
        allocation: Allocation,
        resolved: Resolved,
        role: str,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
    ) -> None:
        self.machine = machine
        self.role = role
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._session = session
        self._allocation = allocation
        self._resolved = resolved
        self._finalizer = weakref.finalize(self, session.free_later, allocation)
        self._finalizer.atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes asked for; the domain gives whole 2 MiB objects."""
        return self._allocation.nbytes

    @property
    def address(self) -> int:
        """The address as the executing device sees it."""
        return self._allocation.address

    @property
    def memory_class(self) -> str:
        return self._allocation.memory_class

    @property
    def policy(self) -> Policy:
        return self._resolved.policy

    @property
    def requested(self) -> tuple[str, ...]:
        """Domain ids asked for; more than one repeats over 2 MiB objects."""
        return self._resolved.pattern

    @property
    def device(self) -> str:
        """The executing device, as `gpuN/pM`."""
        return self._resolved.device

    @property
    def local_guaranteed(self) -> bool:
        """Every byte was asked for on the executing device's own die, and the mode can promise that."""
        return self._resolved.local_guaranteed

    @property
    def freed(self) -> bool:
        return not self._finalizer.alive

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer as a tensor of its shape and dtype."""
        import torch

        self._check_live("view")
        tensor: torch.Tensor = self._session.tensor(self._allocation, getattr(torch, self.dtype), self.shape)
        return tensor

    def owner(self) -> tuple[Any, Allocation]:
        """The session that holds it and its allocation there, for an audit."""
        return self._session, self._allocation

    def locate(self) -> Location:
        """Where the bytes are now, and how that is known."""
        self._check_live("locate")
        found: Location = self._session.locate([self._allocation])
        return found

    def bytes_by_die(self) -> dict[int, int] | None:
        """Bytes on each die of the card; None where the backend cannot look inside a domain."""
        self._check_live("locate")
        look = getattr(self._session, "bytes_by_die", None)
        return look(self._allocation) if look else None

    def move(self, policy: Policy | str) -> Buffer:
        """Give the bytes another home; address, contents and views stay. DomainFull changes nothing."""
        self._check_live("move")
        resolved = resolve(Policy.of(policy), self.machine, self.machine.device(self.device))
        moved = self._session.move(self._allocation, [self.machine.domain(d) for d in resolved.pattern])
        self._finalizer.detach()
        self._allocation, self._resolved = moved, resolved
        self._finalizer = weakref.finalize(self, self._session.free_later, moved)
        self._finalizer.atexit = False
        return self

    def export(self) -> Exported:
        """What another process imports this buffer by (`dp.import_buffer`); keep the buffer alive meanwhile.

        Unsupported for movable memory, and on a backend that does not share between processes.
        """
        from dieplace.sharing import Exported

        self._check_live("export")
        share = getattr(self._session, "export", None)
        if share is None:
            raise Unsupported(f"the {self.machine.backend} backend does not share memory between processes")
        return Exported(
            handle=share(self._allocation),
            nbytes=self.nbytes,
            domain=self.requested[0],
            memory_class=self.memory_class,
            role=self.role,
            name=self.name,
            shape=self.shape,
            dtype=self.dtype,
            backend=self.machine.backend,
            stamp=self.machine.stamp,
        )

    def free(self) -> None:
        """Give the memory back now (with the last view, where views exist); freeing twice is harmless."""
        if self._finalizer.detach() is not None:
            self._session.free(self._allocation)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __repr__(self) -> str:
        state = "freed" if self.freed else f"{self.nbytes:,} bytes"
        return f"Buffer({self.name or self.role}, {self.policy} of {self.device}, {state})"

    def _check_live(self, verb: str) -> None:
        if self.freed:
            raise UsageError(f"cannot {verb} {self.name or self.role}: the buffer was freed", hint="allocate it again")


def allocate(
    machine: Machine,
    size: int | Sequence[int],
    *,
    device: Device | str,
    policy: Policy | str = "local",
    role: str,
    dtype: str = "uint8",
    name: str = "",
    memory_class: str | None = None,
    movable: bool = False,
) -> Buffer:
    """One buffer of `size` bytes, or of a shape in `dtype` (a torch dtype's name), where the policy says.

    `movable` asks for memory that `move` can give another home; on a device that is VMM memory, which cannot be
    exported. Memory outside the executing device's own domain is movable in any case, flags never.

    Raises DomainFull (nothing taken), PlacementError where the policy has no meaning here, UsageError for an unknown
    role, Unsupported on a machine without a memory session.
    """
    if role not in ROLES:
        raise UsageError(f"no role {role!r}", hint=f"one of {', '.join(ROLES)}")
    session = memory_session(machine, "allocate")
    executing = machine.device(device) if isinstance(device, str) else device
    resolved = resolve(Policy.of(policy), machine, executing)
    shape = (size,) if isinstance(size, int) else tuple(size)
    allocation = session.allocate(
        [machine.domain(d) for d in resolved.pattern],
        math.prod(shape) * _item_bytes(dtype),
        memory_class or CLASS_OF_ROLE[role],
        device=executing,
        role=role,
        name=name,
        spill_to=machine.domain(resolved.spill_to) if resolved.spill_to else None,
        movable=movable,
    )
    buffer = Buffer(machine, session, allocation, resolved, role, name, shape, dtype)
    if resolved.spill_to is None:
        _require_home(machine, buffer)
    return buffer


@contextmanager
def placing(machine: Machine, device: Device | str, policy: Policy | str, *, role: str) -> Iterator[Resolved]:
    """Inside, torch allocations of this thread land where the policy says; yields what the policy resolved to.

    Other threads are not covered, autograd's among them: an audit names what they allocate as not placed.
    """
    if role not in ROLES:
        raise UsageError(f"no role {role!r}", hint=f"one of {', '.join(ROLES)}")
    session = memory_session(machine, "place memory")
    executing = machine.device(device) if isinstance(device, str) else device
    resolved = resolve(Policy.of(policy), machine, executing)
    with session.placing([machine.domain(d) for d in resolved.pattern], device=executing, role=role):
        yield resolved


def place(module: Any, *, device: Device, policy: Policy | str = "local", role: str = "weights") -> Any:
    """Move an existing module's parameters and buffers where the policy says; returns the module.

    `device` comes from a machine. Each storage is moved once, so tied tensors stay tied. DomainFull leaves what was
    moved so far where it is and the rest where it was: the audit tells which.
    """
    import torch

    session = memory_session(device._owner(), "place a module")
    moved: dict[int, torch.UntypedStorage] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue
        if storage.data_ptr() not in moved:
            old = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            with device.placing(policy, role=role):
                moved[storage.data_ptr()] = old.to(session.torch_device(device), copy=True).untyped_storage()
        placed = torch.empty(0, dtype=tensor.dtype, device=session.torch_device(device))
        placed.set_(moved[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = placed
    return module


def _require_home(machine: Machine, buffer: Buffer) -> None:
    """A driver may spill and say nothing (ROCm/amdgpu issue 186): without leave to spill that is a full domain."""
    expected = expected_bytes(buffer.requested, buffer.nbytes)
    found = buffer.locate().bytes_by_domain
    wrong = {name: n - expected.get(name, 0) for name, n in found.items() if n > expected.get(name, 0)}
    if not wrong:
        return
    buffer.free()
    host = [name for name in wrong if machine.domain(name).card is None]
    if host:
        raise PlacementError(
            f"{buffer.name or buffer.role} was asked in {', '.join(dict.fromkeys(buffer.requested))} and came back in"
            f" host memory ({', '.join(host)})",
            hint="use another memory class or another ROCm build",
            domains=host,
        )
    domain = buffer.requested[0]
    raise DomainFull(
        f"cannot allocate {buffer.nbytes:,} bytes in {domain}: the allocator put"
        f" {', '.join(f'{n:,} of them in {name}' for name, n in wrong.items())}; all of it was freed",
        hint="free something there, place less, or allow spill='peer'",
        asked_bytes=buffer.nbytes,
        free_bytes=found.get(domain, 0),
        total_bytes=machine.domain(domain).total_bytes,
        domain=domain,
    )


def _item_bytes(dtype: str) -> int:
    import torch

    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"no torch dtype {dtype!r}", hint="give its name, for example bfloat16 or uint8")
    return found.itemsize
