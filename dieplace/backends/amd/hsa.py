"""Who owns an address, by the ROCr runtime below HIP: hsa_ext_amd.h, `hsa_amd_pointer_info`.

Its answer comes from the driver interface's record of the allocating node, which the kernel turns into a page-frame
range: the best static evidence of a die in DPX/NPS2, and what shows that "uncached" memory came back from the host.
"""

from __future__ import annotations

import ctypes

from dieplace.backends.amd.hip_library import mapped
from dieplace.backends.runtime import Owner

_AGENT_DEVICE = 17  # HSA_AGENT_INFO_DEVICE: 0 is a CPU, 1 a GPU
_AGENT_DRIVER_NODE = 0xA004  # HSA_AMD_AGENT_INFO_DRIVER_NODE_ID: the KFD node
_GRAINS = ((8, "extended"), (2, "fine"), (4, "coarse"))  # HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_*


class _PointerInfo(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("agent_base", ctypes.c_void_p),
        ("host_base", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
        ("owner", ctypes.c_uint64),
        ("global_flags", ctypes.c_uint32),
        ("registered", ctypes.c_bool),
    )


class Hsa:
    """The libhsa-runtime64 that HIP has loaded already; it is never started here."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._info = self._library.hsa_amd_pointer_info
        self._info.argtypes = (ctypes.c_void_p, ctypes.POINTER(_PointerInfo), *[ctypes.c_void_p] * 3)
        self._agent = self._library.hsa_agent_get_info
        self._agent.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p)

    def owner(self, address: int) -> Owner | None:
        """The owning node, or None where the runtime does not know the address."""
        found = _PointerInfo(size=ctypes.sizeof(_PointerInfo))
        if self._info(address, ctypes.byref(found), None, None, None) != 0 or found.type == 0:
            return None
        kind, node = self._number(found.owner, _AGENT_DEVICE), self._number(found.owner, _AGENT_DRIVER_NODE)
        if kind is None or node is None:
            return None
        grain = next((word for bit, word in _GRAINS if found.global_flags & bit), "unknown")
        return Owner(node, kind == 1, grain)

    def _number(self, agent: int, attribute: int) -> int | None:
        value = ctypes.c_uint32()
        return value.value if self._agent(agent, attribute, ctypes.byref(value)) == 0 else None


def loaded_hsa() -> Hsa | None:
    """The ROCr runtime of this process, None where none is mapped or it lacks the calls."""
    path = mapped("libhsa-runtime64.so")
    try:
        return Hsa(path) if path is not None else None
    except (OSError, AttributeError):
        return None
