"""What scalar instructions compute, in Python integers, after AMD's published instruction descriptions.

Each entry: destination width (0: only SCC), source widths, and a function of the operands (and SCC where it is read)
that returns (result or None, SCC or None); None means unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isa_numbers import signed

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
Result = tuple[int | None, bool | None]


@dataclass(frozen=True)
class ScalarCase:
    """One scalar operation; `constant` says that the last source is a 16-bit constant in the text."""

    dst: int
    src: tuple[int, ...]
    ref: Callable[..., Result]
    reads_dst: bool = False
    constant: bool = False


CASES: dict[str, ScalarCase] = {}


def _s(value: int, bits: int = 32) -> int:
    return signed(value, bits)


def _case(name: str, dst: int, src: tuple[int, ...], ref: Any, **how: bool) -> None:
    assert name not in CASES, name
    CASES[name] = ScalarCase(dst, src, ref, **how)


def _plain(fn: Callable[..., int], bits: int) -> Any:
    return lambda *x: (fn(*x[:-1]) & ((1 << bits) - 1), None)


def _nonzero(fn: Callable[..., int], bits: int) -> Any:
    def ref(*x: int) -> Result:
        result = fn(*x[:-1]) & ((1 << bits) - 1)
        return result, result != 0

    return ref


def _arithmetic() -> None:
    _case("s_add_u32", 32, (32, 32), lambda a, b, c: ((a + b) & M32, a + b > M32))
    _case("s_sub_u32", 32, (32, 32), lambda a, b, c: ((a - b) & M32, b > a))
    _case("s_addc_u32", 32, (32, 32), lambda a, b, c: ((a + b + c) & M32, a + b + c > M32))
    _case("s_subb_u32", 32, (32, 32), lambda a, b, c: ((a - b - c) & M32, b + c > a))
    for name, fn in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        _case(f"s_{name}_i32", 32, (32, 32),
              lambda a, b, c, f=fn: (f(a, b) & M32, not -(2**31) <= f(_s(a), _s(b)) < 2**31))  # fmt: skip
    _case("s_mul_i32", 32, (32, 32), _plain(lambda a, b: a * b, 32))
    _case("s_mul_hi_u32", 32, (32, 32), _plain(lambda a, b: a * b >> 32, 32))
    _case("s_mul_hi_i32", 32, (32, 32), _plain(lambda a, b: _s(a) * _s(b) >> 32, 32))
    _case("s_min_i32", 32, (32, 32), lambda a, b, c: (min(a, b, key=_s), _s(a) < _s(b)))
    _case("s_max_i32", 32, (32, 32), lambda a, b, c: (max(a, b, key=_s), _s(a) > _s(b)))
    _case("s_min_u32", 32, (32, 32), lambda a, b, c: (min(a, b), a < b))
    _case("s_max_u32", 32, (32, 32), lambda a, b, c: (max(a, b), a > b))
    _case("s_absdiff_i32", 32, (32, 32), _nonzero(lambda a, b: abs(_s(_s(a) - _s(b))), 32))
    _case("s_abs_i32", 32, (32,), _nonzero(lambda a: abs(_s(a)), 32))
    for k in (1, 2, 3, 4):
        _case(f"s_lshl{k}_add_u32", 32, (32, 32),
              lambda a, b, c, k=k: (((a << k) + b) & M32, (a << k) + b > M32))  # fmt: skip
    _case("s_pack_ll_b32_b16", 32, (32, 32), _plain(lambda a, b: a & 0xFFFF | b << 16, 32))
    _case("s_pack_lh_b32_b16", 32, (32, 32), _plain(lambda a, b: a & 0xFFFF | b & 0xFFFF0000, 32))
    _case("s_pack_hh_b32_b16", 32, (32, 32), _plain(lambda a, b: a >> 16 | b & 0xFFFF0000, 32))


def _bfe(bits: int, is_signed: bool) -> Any:
    def fn(a: int, b: int) -> int:
        offset, width = b & (bits - 1), b >> 16 & 0x7F
        if width == 0:
            return 0
        width = min(width, bits - offset)
        field = a >> offset & ((1 << width) - 1)
        return _s(field, width) if is_signed else field

    return _nonzero(fn, bits)


def _bits() -> None:
    logic = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
             "andn2": lambda a, b: a & ~b,
             "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
             "xnor": lambda a, b: ~(a ^ b)}  # fmt: skip
    for bits in (32, 64):
        for name, fn in logic.items():
            _case(f"s_{name}_b{bits}", bits, (bits, bits), _nonzero(fn, bits))
        shift = bits - 1
        _case(f"s_lshl_b{bits}", bits, (bits, 32), _nonzero(lambda a, b, m=shift: a << (b & m), bits))
        _case(f"s_lshr_b{bits}", bits, (bits, 32), _nonzero(lambda a, b, m=shift: a >> (b & m), bits))
        _case(f"s_ashr_i{bits}", bits, (bits, 32), _nonzero(lambda a, b, m=shift, w=bits: _s(a, w) >> (b & m), bits))
        _case(f"s_bfm_b{bits}", bits, (32, 32), _plain(lambda a, b, m=shift: ((1 << (a & m)) - 1) << (b & m), bits))
        _case(f"s_bfe_u{bits}", bits, (bits, 32), _bfe(bits, False))
        _case(f"s_bfe_i{bits}", bits, (bits, 32), _bfe(bits, True))
        _case(f"s_mov_b{bits}", bits, (bits,), _plain(lambda a: a, bits))
        _case(f"s_not_b{bits}", bits, (bits,), _nonzero(lambda a: ~a, bits))
        _case(f"s_cselect_b{bits}", bits, (bits, bits), lambda a, b, c: (a if c else b, None))
        _case(f"s_cmov_b{bits}", bits, (bits, bits), lambda old, a, c: (a if c else old, None), reads_dst=True)
        _case(f"s_brev_b{bits}", bits, (bits,), _plain(lambda a, w=bits: int(f"{a:0{w}b}"[::-1], 2), bits))
        _case(f"s_bcnt1_i32_b{bits}", 32, (bits,), _nonzero(lambda a: a.bit_count(), 32))
        _case(f"s_bcnt0_i32_b{bits}", 32, (bits,), _nonzero(lambda a, w=bits: w - a.bit_count(), 32))
        first = lambda a: (a & -a).bit_length() - 1 if a else M32  # noqa: E731
        _case(f"s_ff1_i32_b{bits}", 32, (bits,), _plain(first, 32))
        _case(f"s_ff0_i32_b{bits}", 32, (bits,), _plain(lambda a, w=bits, f=first: f(~a & ((1 << w) - 1)), 32))
        _case(f"s_flbit_i32_b{bits}", 32, (bits,), _plain(lambda a, w=bits: w - a.bit_length() if a else M32, 32))
        _case(f"s_bitset0_b{bits}", bits, (bits, 32), _plain(lambda old, a, m=shift: old & ~(1 << (a & m)), bits),
              reads_dst=True)  # fmt: skip
        _case(f"s_bitset1_b{bits}", bits, (bits, 32), _plain(lambda old, a, m=shift: old | 1 << (a & m), bits),
              reads_dst=True)  # fmt: skip
        for value in (0, 1):
            _case(f"s_bitcmp{value}_b{bits}", 0, (bits, 32),
                  lambda a, b, c, m=shift, v=value: (None, a >> (b & m) & 1 == v))  # fmt: skip
    _case("s_flbit_i32", 32, (32,), _plain(_sign_run, 32))
    _case("s_sext_i32_i8", 32, (32,), _plain(lambda a: _s(a, 8), 32))
    _case("s_sext_i32_i16", 32, (32,), _plain(lambda a: _s(a, 16), 32))
    _case("s_wqm_b64", 64, (64,), _nonzero(lambda a: sum(15 << k for k in range(0, 64, 4) if a >> k & 15), 64))


def _sign_run(a: int) -> int:
    text = f"{a:032b}"
    return next((i for i in range(1, 32) if text[i] != text[0]), M32)


def _compares() -> None:
    relations = {"eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
                 "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}  # fmt: skip
    for name, fn in relations.items():
        _case(f"s_cmp_{name}_u32", 0, (32, 32), lambda a, b, c, f=fn: (None, f(a, b)))
        _case(f"s_cmp_{name}_i32", 0, (32, 32), lambda a, b, c, f=fn: (None, f(_s(a), _s(b))))
        _case(f"s_cmpk_{name}_u32", 0, (32, 32), lambda a, k, c, f=fn: (None, f(a, k & 0xFFFF)), constant=True)
        _case(f"s_cmpk_{name}_i32", 0, (32, 32), lambda a, k, c, f=fn: (None, f(_s(a), _s(k, 16))), constant=True)
        if name in ("eq", "lg"):
            _case(f"s_cmp_{name}_u64", 0, (64, 64), lambda a, b, c, f=fn: (None, f(a, b)))
    _case("s_movk_i32", 32, (32,), _plain(lambda k: _s(k, 16), 32), constant=True)
    _case("s_mulk_i32", 32, (32, 32), _plain(lambda a, k: a * _s(k, 16), 32), reads_dst=True, constant=True)
    _case("s_cmovk_i32", 32, (32, 32), lambda a, k, c: (_s(k, 16) & M32 if c else a, None), reads_dst=True,
          constant=True)  # fmt: skip
    _case("s_addk_i32", 32, (32, 32),
          lambda a, k, c: ((a + _s(k, 16)) & M32, not -(2**31) <= _s(a) + _s(k, 16) < 2**31), reads_dst=True,
          constant=True)  # fmt: skip


# EXEC after the instruction, from EXEC before and the source.
SAVEEXEC: dict[str, Callable[[int, int], int]] = {
    "and": lambda e, s: e & s, "or": lambda e, s: e | s, "xor": lambda e, s: e ^ s, "andn1": lambda e, s: ~s & e,
    "andn2": lambda e, s: s & ~e, "orn1": lambda e, s: ~s | e, "orn2": lambda e, s: s | ~e,
    "nand": lambda e, s: ~(e & s), "nor": lambda e, s: ~(e | s), "xnor": lambda e, s: ~(e ^ s),
}  # fmt: skip

_arithmetic()
_bits()
_compares()
