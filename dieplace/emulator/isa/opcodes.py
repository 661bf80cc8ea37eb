"""Importing this module fills the opcode table."""

from dieplace.emulator.isa import (  # noqa: F401
    buffer,
    control,
    convert,
    convert_blocks,
    convert_scaled,
    lds,
    mfma,
    permute,
    salu_ops,
    smem,
    valu_compare,
    valu_dot,
    valu_float,
    valu_int,
    valu_packed,
    valu_wide,
    vmem,
)
