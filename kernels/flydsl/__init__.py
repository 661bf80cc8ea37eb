"""FlyDSL kernels of the decode ops: which module has which op. Importing this package imports no FlyDSL."""

from __future__ import annotations

_HERE = "dieplace.kernels.flydsl"
OPS: dict[str, str] = {
    "gemv_bf16": f"{_HERE}.gemv:gemv_bf16",
    "gemv_mxfp4": f"{_HERE}.gemv:gemv_mxfp4",
}
