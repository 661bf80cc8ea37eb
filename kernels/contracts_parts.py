"""What contracts are written with: operands by role, dtypes, common rules, tolerances and their reasons."""

from __future__ import annotations

from dieplace.kernels.registry import OUTPUT, OperandSpec, Tolerance

BF16, F32, I32, U8 = ("bfloat16",), ("float32",), ("int32",), ("uint8",)
OUT = ("bfloat16", "float32")
SCALES = ("uint8", "float8_e8m0fnu")

TOKENS = ("T <= 8", "a decode step takes 1 to 8 tokens")
GROUPS = ("HQ % HKV == 0", "query heads share KV heads in equal groups")
MX = ("K % 32 == 0", "MX blocks hold 32 values")

ONE_ROUNDING = 1.01  # unit roundoffs of the output type; the hundredth covers a tie broken by the accumulation error

LINEAR = Tolerance(
    ONE_ROUNDING, 2.0**-18, "fp32 sums: at most 64 roundings of 2^-24 in any path of a lane's sum and the wave's tree"
)
EXPONENT = Tolerance(
    ONE_ROUNDING, 2.0**-17, "fp32 sums and exp2, reciprocal within 2 ulp (ISA: v_exp_f32, v_rcp_f32 1 ulp)"
)
NORM = Tolerance(
    2.02, 2.0**-20, "an fp32 sum of squares can move the inner bf16 rounding of after_cast by one unit: two roundings"
)
EXACT = Tolerance(0.0, 0.0, "values are copied or chosen, not computed", floor=0.0)


def weight(name: str, dtypes: tuple[str, ...], *shape: str, optional: bool = False) -> OperandSpec:
    return OperandSpec(name, "weights", dtypes, shape, optional=optional)


def given(name: str, dtypes: tuple[str, ...], *shape: str, optional: bool = False) -> OperandSpec:
    return OperandSpec(name, "activation", dtypes, shape, optional=optional)


def output(name: str, dtypes: tuple[str, ...], *shape: str, optional: bool = False, use: str = OUTPUT) -> OperandSpec:
    return OperandSpec(name, "activation", dtypes, shape, use=use, optional=optional)


def kv(name: str, *shape: str, use: str = "input") -> OperandSpec:
    return OperandSpec(name, "kv_cache", BF16, shape, use=use)


def flag(name: str, dtypes: tuple[str, ...], *shape: str, use: str = "input", strided: bool = False) -> OperandSpec:
    return OperandSpec(name, "sync_flag", dtypes, shape, use=use, strided=strided)
