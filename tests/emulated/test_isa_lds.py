"""LDS instructions against bytes laid out with struct."""

from __future__ import annotations

import random
import struct

import pytest
from isa_atomics import atomic_operands, atomic_reference
from isa_bench import ALL, run_wave
from isa_numbers import signed
from isa_tables import LDS_ATOMICS, LDS_PAIRS, LDS_READS, LDS_WRITES

MASK = 0xF00F_0FF0_1234_80FF
M32 = 0xFFFFFFFF


def registers(first: int, words: int) -> str:
    return f"v{first}" if words == 1 else f"v[{first}:{first + words - 1}]"


@pytest.mark.parametrize("name", sorted(LDS_READS))
def test_read(name: str) -> None:
    size, is_signed, half = LDS_READS[name]
    words, data = max(1, size // 4), random.Random(name).randbytes(64 * 16 + 32)
    places = random.Random(name).sample(range(0, 1024, 16), 64)
    old = [0x5A5A0000 | lane for lane in range(64)]
    for mask in (ALL, MASK):
        vgprs = {2: places} | {8 + k: old for k in range(words)}
        after = run_wave(f"ds_read_{name} {registers(8, words)}, v2 offset:16", vgprs, exec_mask=mask, lds=data)
        for lane in range(64):
            got = [after.v(8 + k)[lane] for k in range(words)]
            raw = data[places[lane] + 16 : places[lane] + 16 + size]
            want = list(struct.unpack(f"<{words}I", raw)) if size >= 4 else [int.from_bytes(raw, "little")]
            want = [signed(want[0], 8 * size) & M32] if is_signed else want
            if half is not None:
                low = want[0] & 0xFFFF
                want = [old[lane] & 0xFFFF | low << 16 if half else old[lane] & 0xFFFF0000 | low]
            assert got == (want if mask >> lane & 1 else [old[lane]] * words), f"lane {lane}"


@pytest.mark.parametrize("name", sorted(LDS_WRITES))
def test_write(name: str) -> None:
    size, half = LDS_WRITES[name]
    words, rng = max(1, size // 4), random.Random(name)
    values = {8 + k: [rng.getrandbits(32) for _ in range(64)] for k in range(words)}
    places = rng.sample(range(0, 1024, 16), 64)
    after = run_wave(f"ds_write_{name} v2, {registers(8, words)} offset:16", {2: places} | values, exec_mask=MASK,
                     lds=bytes(1056))  # fmt: skip
    want = bytearray(1056)
    for lane in range(64):
        if MASK >> lane & 1:
            raw = b"".join(struct.pack("<I", values[8 + k][lane]) for k in range(words))[2 * half :]
            want[places[lane] + 16 : places[lane] + 16 + size] = raw[:size]
    assert after.lds(0, 1056) == bytes(want)


@pytest.mark.parametrize("name", sorted(LDS_PAIRS))
def test_two_places(name: str) -> None:
    size, stride = LDS_PAIRS[name]
    words, rng = size // 4, random.Random(name)
    first, second = 1, 3
    step = size * stride
    data, total = rng.randbytes(4096 + 64 * 8), 4096 + 64 * 8
    places = [size * lane for lane in range(64)]
    if name.startswith("read"):
        text = f"ds_{name} {registers(8, 2 * words)}, v2 offset0:{first} offset1:{second}"
        after = run_wave(text, {2: places}, lds=data)
        for lane in range(64):
            raw = b"".join(data[places[lane] + o * step :][:size] for o in (first, second))
            assert [after.v(8 + k)[lane] for k in range(2 * words)] == list(struct.unpack(f"<{2 * words}I", raw))
        return
    values = {r: [rng.getrandbits(32) for _ in range(64)] for r in range(8, 8 + 2 * words)}
    text = f"ds_{name} v2, {registers(8, words)}, {registers(8 + words, words)} offset0:{first} offset1:{second}"
    after = run_wave(text, {2: places} | values, exec_mask=1 << 7, lds=bytes(total))
    want = bytearray(total)
    for number, offset in enumerate((first, second)):
        raw = b"".join(struct.pack("<I", values[8 + number * words + k][7]) for k in range(words))
        want[places[7] + offset * step : places[7] + offset * step + size] = raw
    assert after.lds(0, total) == bytes(want)


@pytest.mark.parametrize("name", sorted(LDS_ATOMICS))
def test_atomic(name: str) -> None:
    operation, size = LDS_ATOMICS[name]
    rng, words, returns = random.Random(name), size // 4, "rtn" in name
    start = [atomic_operands(operation, size, rng) for _ in range(16)]
    places = [rng.randrange(16) for _ in range(64)]
    parts = 2 if operation == "cmpst" else 1
    operands = [[atomic_operands(operation, size, rng) for _ in range(parts)] for _ in range(64)]
    if operation == "cmpst":  # the compare value comes first
        operands = [[start[places[lane]] if lane & 1 else op[0], op[1]] for lane, op in enumerate(operands)]
    vgprs = {2: [size * p for p in places]}
    names = []
    for part in range(parts):
        first = 8 + 4 * part
        names.append(registers(first, words))
        for k in range(words):
            vgprs[first + k] = [operands[lane][part] >> 32 * k & M32 for lane in range(64)]
    target = f"{registers(20, words)}, " if returns else ""
    data = b"".join(v.to_bytes(size, "little") for v in start)
    after = run_wave(f"ds_{name} {target}v2, {', '.join(names)}", vgprs, exec_mask=MASK, lds=data)
    memory = list(start)
    for lane in range(64):
        if MASK >> lane & 1:
            before, op = memory[places[lane]], operands[lane]
            new = (op[1] if before == op[0] else before) if operation == "cmpst" else atomic_reference(
                operation, before, op, size)  # fmt: skip
            memory[places[lane]] = new
            if returns:
                assert sum(after.v(20 + k)[lane] << 32 * k for k in range(words)) == before
    assert after.lds(0, len(data)) == b"".join(v.to_bytes(size, "little") for v in memory)


def test_transposing_read_turns_rows_of_sixteen_lanes_into_columns() -> None:
    """ds_read_b64_tr_b16 as FlyDSL's gfx950 flash attention relies on it: 16 lanes hold a 4 x 16 matrix by rows."""
    halves = [random.Random("tr").getrandbits(16) for _ in range(256)]
    after = run_wave("ds_read_b64_tr_b16 v[8:9], v2", {2: [8 * lane for lane in range(64)]},
                     lds=struct.pack("<256H", *halves))  # fmt: skip
    for block in range(4):
        matrix = [halves[64 * block + 16 * row : 64 * block + 16 * row + 16] for row in range(4)]
        for column in range(16):
            lane = 16 * block + column
            got = struct.unpack("<4H", struct.pack("<2I", after.v(8)[lane], after.v(9)[lane]))
            assert list(got) == [matrix[row][column] for row in range(4)]
