"""Memory at a raw address as a torch tensor on a device index of our choosing.

`__cuda_array_interface__` takes the device from the pointer, which for memory of the peer is the peer's index; a DLPack
capsule states the index itself, so the tensor stays on the device that executes. Layout: dlpack.h, version 0.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU, CUDA, ROCM = 1, 2, 10  # DLDeviceType
_UINT8 = (1, 8, 1)  # kDLUInt, bits, lanes: fp8 and fp4 do not pass through DLPack, so bytes do


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

# Structures of live tensors and what to call when they die, by address of the structure.
_live: dict[int, tuple[_Managed, Any, Callable[[], None]]] = {}


def tensor_at(
    address: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int], kind: int, index: int, dead: Callable[[], None]
) -> torch.Tensor:
    """A tensor over `nbytes` at `address`; `dead` is called once, from any thread, when its storage has died."""
    import torch

    shape_of_bytes = (ctypes.c_int64 * 1)(nbytes)
    managed = _Managed()
    managed.tensor = _DLTensor(address, kind, index, 1, *_UINT8, shape_of_bytes, None, 0)
    managed.deleter = _deleter
    key = ctypes.addressof(managed)
    _live[key] = (managed, shape_of_bytes, dead)
    try:
        flat = torch.from_dlpack(_new_capsule(key, b"dltensor", None))
    except Exception:
        _live.pop(key)
        dead()
        raise
    return flat.view(dtype).view(tuple(shape))


@_Deleter
def _deleter(managed: Any) -> None:
    _, _, dead = _live.pop(ctypes.addressof(managed.contents))
    dead()


@atexit.register
def _let_go() -> None:
    """Tensors that outlive the interpreter must not call into it: the driver takes their memory back."""
    for managed, _, _ in _live.values():
        managed.deleter = _Deleter()
