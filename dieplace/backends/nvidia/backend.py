"""NVIDIA GPUs: discovery through the driver's own libraries. No partitioning; MIG is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dieplace.backends.availability import Availability
from dieplace.backends.nvidia import topology
from dieplace.backends.nvidia.nvml import Nvml, NvmlError
from dieplace.errors import BackendError
from dieplace.machine import Machine
from dieplace.sysfs import Sysfs

if TYPE_CHECKING:
    from dieplace.backends.device_memory import DeviceMemory
    from dieplace.backends.torch_execution import TorchExecution


class NvidiaBackend:
    """Each GPU is a card with one device and one domain."""

    name = "nvidia"
    groups = frozenset({"always", "memory", "execution"})

    def __init__(self, *, root: str | Path = "/") -> None:
        self.sysfs = Sysfs(root)
        self._device_memory: DeviceMemory | None = None

    def probe(self) -> Availability:
        """Yes when the driver's management library lists a GPU."""
        if self.sysfs.root != Path("/"):
            return Availability(False, "the NVIDIA driver answers for the live host only, not for another root")
        try:
            with Nvml() as nvml:
                count, version = len(nvml.gpus()), nvml.version()
        except NvmlError as error:
            return Availability(False, str(error), "install the NVIDIA driver")
        if count == 0:
            return Availability(False, "the NVIDIA driver lists no GPU")
        return Availability(True, f"the NVIDIA driver lists {count} GPUs", None, {"nvidia_driver": version})

    def snapshot(self, *, links: bool = True, ask_cuda: bool = True) -> Machine:
        """The node now; `ask_cuda=False` does not start CUDA in this process."""
        try:
            return topology.snapshot(self.sysfs, self, ask_cuda=ask_cuda)
        except NvmlError as error:
            raise BackendError(f"the NVIDIA driver failed: {error}", hint="see: nvidia-smi") from error

    @property
    def memory(self) -> DeviceMemory:
        """CUDA memory of the machine, opened on first use; Unsupported where the driver cannot be opened."""
        if self._device_memory is None:
            from dieplace.backends.nvidia.memory import cuda_memory

            self._device_memory = cuda_memory(self.snapshot(links=False))
        return self._device_memory

    @property
    def execution(self) -> TorchExecution:
        """Launches and times through torch; Unsupported where torch or Triton cannot drive these GPUs."""
        from dieplace.backends.torch_execution import TorchExecution

        return TorchExecution(self.name, lambda device: self.memory.homes.index(device))

    def stamp(self) -> tuple[str | None, str | None]:
        """(boot id, None): the driver counts no generations."""
        return (self.sysfs.read_or_none("/proc/sys/kernel/random/boot_id"), None)
