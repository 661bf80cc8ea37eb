"""PTX for MXFP4 rows on matrix units: text only, so that a test can evaluate it without a GPU.

A lane holds one 32-value block of two rows (four words each) and the same block of x. The instruction
mma.m16n8k16 multiplies 16 rows by 8 columns; a quad of lanes supplies one row of each half and one column. If every
quad supplies its *own* x as the column, the products that belong together lie on the diagonal of the result: element
(g, g) is the dot product of quad g's words of the first row with quad g's x, and (g + 8, g) that of the second. Seven
eighths of the multiplications are wasted, which costs nothing: matrix units would idle else, and no lane spends an
fp32 instruction on a weight. Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type".

An e2m1 value with its sign at bit 15 and the rest at bits 8 to 6 *is* a bf16 2^-126 times as large, subnormals
included (OCP Microscaling Formats v1.0, section 5.3), so multiplication by 2^(scale byte - 1) gives the weight
exactly, bytes 0 to 128. The factor of larger bytes is no bf16: it is made infinite, the result is then not finite,
and such rows are done again by `exact`, in fp32.
"""

from __future__ import annotations

LARGEST_SCALE = 128
FACTOR_BIAS, FACTOR_PAIR = 126, 0x00800080  # (byte + 126) << 7 is the bf16 2^(byte - 1), in both halves of a word
_UNIT_FACTOR = 0x7E807E80  # 2^126 twice
_MASK = 0x81C081C0

# Operands: four results, words of rows a and b, x pairs of the four words, one factor a row (repeated per element),
# and what the four results begin with.
_ROW = (4, 8)
_X, _FACTOR, _START = 12, (28, 32), 36
OPERANDS = ",".join(["=&f"] * 4 + ["r"] * 32 + ["f"] * 4)

# x as stored is pairs (0,1) (2,3) (4,5) (6,7); nibbles i and i+4 of a word sit 16 bits apart, so a word decodes to
# (0,4) (1,5) (2,6) (3,7). The order of K is free as long as both sides agree.
PAIRS = (
    "prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632; "
    "prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632;"
)
PAIRS_OPERANDS = "=&r,=&r,=&r,=&r,r,r,r,r"


def _decode(into: str, word: str, odd: int, factor: str) -> str:
    """Nibbles `odd` and `odd` + 4 of a word as two bf16 times `factor`; one product puts sign and value in place."""
    only, places = (0x00F000F0, 1 << 8 | 1 << 2) if odd else (0x000F000F, 1 << 12 | 1 << 6)
    return (
        f"and.b32 t, {word}, {only:#x}; mul.lo.u32 t, t, {places:#x}; and.b32 t, t, {_MASK:#x}; "
        f"mul.rn.bf16x2 {into}, t, {factor};"
    )


def diagonal() -> str:
    """Results: elements (g, 2q), (g, 2q+1), (g+8, 2q), (g+8, 2q+1) of start + product, lane = 4 g + q."""
    lines = [".reg .b32 t, ha, hb, a0, a1, a2, a3;"]
    before = f"{{${_START}, ${_START + 1}, ${_START + 2}, ${_START + 3}}}"
    for word in range(4):
        for upper in range(2):
            source = [f"${row + word}" for row in _ROW]
            if upper:
                lines.append(f"shr.u32 ha, {source[0]}, 8; shr.u32 hb, {source[1]}, 8;")
                source = ["ha", "hb"]
            for odd in range(2):
                lines += [_decode(f"a{2 * odd + row}", source[row], odd, f"${_FACTOR[row]}") for row in range(2)]
            x = _X + 4 * word + 2 * upper
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{${x}, ${x + 1}}}, {before};"
            )
            before = "{$0, $1, $2, $3}"
    return _block(lines)


def exact() -> str:
    """Results: start + the lane's own dot products, row a in $0 and b in $2, fp32; the factors are scale bytes here."""
    lines = [
        ".reg .b32 t, k, u, h; .reg .f32 w, x, m, q, ra, rb;",
        f"mov.b32 k, {_UNIT_FACTOR:#x}; mov.f32 ra, 0f00000000; mov.f32 rb, 0f00000000;",
    ]
    for total, row in (("ra", _ROW[0]), ("rb", _ROW[1])):
        for word in range(4):
            lines.append(f"shr.u32 h, ${row + word}, 8;")
            for pair in range(4):
                x = f"${_X + 4 * word + pair}"
                lines.append(_decode("t", "h" if pair >= 2 else f"${row + word}", pair % 2, "k"))
                lines.append(f"shl.b32 u, t, 16; mov.b32 w, u; shl.b32 u, {x}, 16; mov.b32 x, u;")
                lines.append(f"fma.rn.f32 {total}, w, x, {total};")
                lines.append(f"and.b32 u, t, 0xFFFF0000; mov.b32 w, u; and.b32 u, {x}, 0xFFFF0000; mov.b32 x, u;")
                lines.append(f"fma.rn.f32 {total}, w, x, {total};")
    for total, byte, result, start in (
        ("ra", _FACTOR[0], "$0", f"${_START}"),
        ("rb", _FACTOR[1], "$2", f"${_START + 2}"),
    ):
        # Byte 0 is the subnormal 2^-127; byte 255 gives infinity, and infinity times zero makes it NaN.
        lines.append(f"shl.b32 u, ${byte}, 23; max.s32 u, u, 0x00400000; mov.b32 m, u;")
        lines.append(f"mul.f32 q, m, 0f00000000; add.f32 m, m, q; fma.rn.f32 {result}, {total}, m, {start};")
    lines.append(f"mov.f32 $1, ${_START + 1}; mov.f32 $3, ${_START + 3};")
    return _block(lines)


def _block(lines: list[str]) -> str:
    return "\n".join(["{", *lines, "}"])
