"""Where a decode step's tensors live: one `allocate` per shard and role, on the host or on a machine's dies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dieplace.errors import UsageError
from dieplace.policy import Policy
from dieplace.workload import ROLES

if TYPE_CHECKING:
    from dieplace.machine import Machine
    from dieplace.memory import Buffer

HOST = "host"


@dataclass
class Placement:
    """Allocates for each shard, says where a tensor's bytes are, and enters the device that runs a shard.

    `torch_devices` has one torch device a shard (all the host's memory by default).
    """

    shards: int = 1
    torch_devices: tuple[str, ...] = ()

    def allocate(self, shard: int, role: str, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
        """A tensor of `role` for one shard; the content is undefined."""
        device = self.torch_devices[shard] if self.torch_devices else "cpu"
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def bytes_by_place(self, tensor: Tensor, nbytes: int) -> dict[str, int]:
        """How `nbytes` of a tensor divide over dies (`gpu0/die1`); a plain tensor's place is its torch device."""
        return {HOST if tensor.device.type == "cpu" else str(tensor.device): nbytes}

    def on(self, shard: int) -> AbstractContextManager[Any]:
        """The context in which a shard's kernels are launched; what it yields may have `records` of the launches."""
        device = self.torch_devices[shard] if self.torch_devices else "cpu"
        return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


@dataclass
class MachinePlacement(Placement):
    """Buffers of a machine's memory session: shard s runs on `devices[s]`, each role goes where its policy says."""

    machine: Machine | None = None
    devices: tuple[str, ...] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)
    run_on: Callable[[str], AbstractContextManager[Any]] = lambda device: nullcontext()
    buffers: list[Buffer] = field(default_factory=list)
    _by_address: dict[int, Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.devices) != self.shards:
            raise UsageError(f"{self.shards} shard(s) need as many devices, {len(self.devices)} were named")
        unknown = set(self.policies) - set(ROLES)
        if unknown:
            raise UsageError(f"no role {sorted(unknown)[0]!r}", hint=f"one of {', '.join(ROLES)}")

    def allocate(self, shard: int, role: str, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
        from dieplace import memory

        assert self.machine is not None
        policy = self.policies.get(role, Policy.local())
        word = str(dtype).removeprefix("torch.")
        device = self.devices[shard]
        buffer = memory.allocate(self.machine, shape, device=device, policy=policy, role=role, dtype=word, name=name)
        self.buffers.append(buffer)
        self._by_address[buffer.address] = buffer
        return buffer.tensor

    def bytes_by_place(self, tensor: Tensor, nbytes: int) -> dict[str, int]:
        """In proportion to where the buffer's bytes are; the remainder of a division goes to the largest share."""
        buffer = self._owner(tensor)
        if buffer is None:
            return super().bytes_by_place(tensor, nbytes)
        by_die = buffer.bytes_by_die()
        card = buffer.device.split("/")[0]
        # Where nobody can look inside a domain, the domain is what is known.
        parts = {f"{card}/die{die}": n for die, n in by_die.items()} if by_die else buffer.locate().bytes_by_domain
        total = sum(parts.values())
        shares = {place: nbytes * part // total for place, part in parts.items()}
        shares[max(shares, key=lambda place: shares[place])] += nbytes - sum(shares.values())
        return shares

    def on(self, shard: int) -> AbstractContextManager[Any]:
        return self.run_on(self.devices[shard])

    def _owner(self, tensor: Tensor) -> Buffer | None:
        address = tensor.data_ptr()
        exact = self._by_address.get(address)  # nearly always: an operand is a whole buffer
        inside = (b for b in self.buffers if b.address <= address < b.address + max(1, b.nbytes))
        return exact or next(inside, None)


def on_machine(
    machine: Machine, devices: Sequence[str], policies: Mapping[str, Policy] | None = None, **session: Any
) -> MachinePlacement:
    """One shard per device; roles without a policy are local.

    On an emulated machine FlyDSL kernels run on its emulated devices and every launch is counted; `session` are further
    options of `dieplace.emulator.execution.Session`.
    """
    run_on = _emulated_devices(machine, session) if machine.source == "emulated" else (lambda device: nullcontext())
    return MachinePlacement(
        len(devices), machine=machine, devices=tuple(devices), policies=dict(policies or {}), run_on=run_on
    )


def _emulated_devices(machine: Machine, options: Mapping[str, Any]) -> Callable[[str], AbstractContextManager[Any]]:
    from dieplace.emulator.execution import Session
    from dieplace.memory import memory_session

    hbm = memory_session(machine, "run kernels").hbm
    return lambda device: Session(device=machine.device(device), memory=hbm, **options)
