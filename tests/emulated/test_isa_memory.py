"""Global, flat, buffer and scalar memory instructions against bytes laid out with struct."""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

import pytest
from isa_atomics import atomic_operands, atomic_reference
from isa_bench import ALL, run_wave
from isa_numbers import signed
from isa_tables import ATOMICS, LOADS, SCALAR_LOADS, STORES, TO_LDS

from dieplace.emulator.isa import Buffer

MASK = 0xF00F_0FF0_1234_8001
M32 = 0xFFFFFFFF


class Host:
    """A host buffer, 64-byte aligned, with its bytes as Python sees them."""

    def __init__(self, data: bytes, name: str = "data") -> None:
        self.store = (ctypes.c_uint8 * (len(data) + 64))()
        address = ctypes.addressof(self.store)
        self.base = -(-address // 64) * 64
        self.size = len(data)
        self.buffer = Buffer(name, self.base, len(data))
        ctypes.memmove(self.base, data, len(data))

    def bytes(self) -> bytes:
        return ctypes.string_at(self.base, self.size)


def random_bytes(count: int, seed: str) -> bytes:
    return random.Random(seed).randbytes(count)


def addressing(space: str, host: Host, offsets: list[int]) -> tuple[str, dict[int, Any], dict[int, int]]:
    """Operand text after the data register, and the registers it needs; lane l addresses offsets[l]."""
    if space == "buffer":
        return "v2, s[20:23], 0 offen", {2: offsets}, descriptor(host)
    if space == "flat":
        places = [host.base + o for o in offsets]
        return "v[2:3]", {2: [p & M32 for p in places], 3: [p >> 32 for p in places]}, {}
    return "v2, s[20:21]", {2: offsets}, {20: host.base & M32, 21: host.base >> 32}


def descriptor(host: Host, records: int | None = None, stride: int = 0) -> dict[int, int]:
    return {20: host.base & M32, 21: host.base >> 32 | stride << 16, 22: host.size if records is None else records,
            23: 0x00027000}  # fmt: skip


def statement(mnemonic: str, space: str, data: str, where: str, *, store: bool = False, modifiers: str = "") -> str:
    if space == "buffer":
        return f"{mnemonic} {data}, {where}{modifiers}"
    vaddr, _, saddr = where.partition(", ")
    operands = [vaddr, data] if store else [data, vaddr]
    return f"{mnemonic} {', '.join(operands + ([saddr] if saddr else []))}{modifiers}"


def registers(first: int, words: int) -> str:
    return f"v{first}" if words == 1 else f"v[{first}:{first + words - 1}]"


@pytest.mark.parametrize("suffix", sorted(LOADS))
@pytest.mark.parametrize("space", ["global", "flat", "buffer"])
def test_load(space: str, suffix: str) -> None:
    size, is_signed, half = LOADS[suffix]
    words, data = max(1, size // 4), random_bytes(64 * 16 + 64, suffix)
    host = Host(data)
    rng = random.Random(suffix)
    offsets = [16 * lane + rng.choice([0, min(size, 4), 2 * min(size, 4)]) // size * size for lane in range(64)]
    rng.shuffle(offsets)
    where, vgprs, sgprs = addressing(space, host, offsets)
    old = [0xA5A50000 | lane for lane in range(64)]
    vgprs |= {8 + k: old for k in range(words)}
    text = statement(f"{space}_load_{suffix}", space, registers(8, words), where, modifiers=" offset:8")
    for mask in (ALL, MASK):
        after = run_wave(text, vgprs, sgprs, exec_mask=mask, buffers=(host.buffer,))
        for lane in range(64):
            got = [after.v(8 + k)[lane] for k in range(words)]
            if not mask >> lane & 1:
                assert got == [old[lane]] * words
                continue
            raw = data[offsets[lane] + 8 : offsets[lane] + 8 + size]
            want = list(struct.unpack(f"<{words}I", raw)) if size >= 4 else [int.from_bytes(raw, "little")]
            if is_signed:
                want = [signed(want[0], 8 * size) & M32]
            if half is not None:
                value = want[0] & 0xFFFF
                want = [old[lane] & 0xFFFF | value << 16 if half else old[lane] & 0xFFFF0000 | value]
            assert got == want, f"lane {lane}"


@pytest.mark.parametrize("suffix", sorted(STORES))
@pytest.mark.parametrize("space", ["global", "flat", "buffer"])
def test_store(space: str, suffix: str) -> None:
    size, half = STORES[suffix]
    words = max(1, size // 4)
    rng = random.Random(suffix)
    values = {8 + k: [rng.getrandbits(32) for _ in range(64)] for k in range(words)}
    for mask in (ALL, MASK):
        host = Host(bytes(64 * 16 + 64))
        where, vgprs, sgprs = addressing(space, host, [16 * (63 - lane) for lane in range(64)])
        text = statement(
            f"{space}_store_{suffix}", space, registers(8, words), where, store=True, modifiers=" offset:4"
        )
        run_wave(text, vgprs | values, sgprs, exec_mask=mask, buffers=(host.buffer,))
        want = bytearray(host.size)
        for lane in range(64):
            if mask >> lane & 1:
                raw = b"".join(struct.pack("<I", values[8 + k][lane]) for k in range(words))
                raw = raw[2:] if half else raw
                place = 16 * (63 - lane) + 4
                want[place : place + size] = raw[:size]
        assert host.bytes() == bytes(want)


@pytest.mark.parametrize("suffix", sorted(ATOMICS))
@pytest.mark.parametrize("space", ["global", "flat", "buffer"])
@pytest.mark.parametrize("returns", [False, True])
def test_atomic(space: str, suffix: str, returns: bool) -> None:
    size, name = ATOMICS[suffix], suffix.removesuffix("_x2")
    rng, words = random.Random(suffix), ATOMICS[suffix] // 4
    start = [atomic_operands(name, size, rng) for _ in range(16)]
    host = Host(b"".join(v.to_bytes(size, "little") for v in start))
    places = [rng.randrange(16) for _ in range(64)]
    parts = 2 if name == "cmpswap" else 1
    operands = [[atomic_operands(name, size, rng) for _ in range(parts)] for _ in range(64)]
    if name == "cmpswap":
        operands = [[op[0], start[places[lane]] if lane & 1 else op[1]] for lane, op in enumerate(operands)]
    where, vgprs, sgprs = addressing(space, host, [size * p for p in places])
    flat = [[w for v in op for w in struct.unpack(f"<{words}I", v.to_bytes(size, "little"))] for op in operands]
    vgprs |= {8 + k: [flat[lane][k] for lane in range(64)] for k in range(parts * words)}
    data = registers(8, parts * words)
    text = statement(f"{space}_atomic_{suffix}", space, data, where, store=True)
    if returns:
        text = text.replace(" ", f" {registers(16, words)}, ", 1) if space != "buffer" else text
        text += " sc0"
    mask = MASK | 0xFF
    after = run_wave(text, vgprs, sgprs, exec_mask=mask, buffers=(host.buffer,))
    memory = list(start)
    for lane in range(64):
        if not mask >> lane & 1:
            continue
        before = memory[places[lane]]
        memory[places[lane]] = atomic_reference(name, before, operands[lane], size)
        if returns:
            first = 8 if space == "buffer" else 16
            got = sum(after.v(first + k)[lane] << 32 * k for k in range(words))
            assert got == before, f"lane {lane}: old value"
    assert host.bytes() == b"".join(v.to_bytes(size, "little") for v in memory)


@pytest.mark.parametrize("suffix", sorted(SCALAR_LOADS))
@pytest.mark.parametrize("prefix", ["s_load", "s_buffer_load"])
def test_scalar_load(prefix: str, suffix: str) -> None:
    words, data = SCALAR_LOADS[suffix], random_bytes(256, suffix)
    host = Host(data)
    base = "s[20:21]" if prefix == "s_load" else "s[20:23]"
    for offset_text, offset, extra in (
        ("0x24", 0x24, {}),
        ("s30", 0x40, {30: 0x40}),
        ("s30 offset:0x8", 0x48, {30: 0x40}),
    ):
        text = f"{prefix}_{suffix} {'s40' if words == 1 else f's[40:{39 + words}]'}, {base}, {offset_text}"
        after = run_wave(text, {}, descriptor(host) | extra, buffers=(host.buffer,))
        want = struct.unpack(f"<{words}I", data[offset : offset + 4 * words])
        assert tuple(after.s(40 + k) for k in range(words)) == want


@pytest.mark.parametrize("suffix", sorted(TO_LDS))
def test_global_load_to_lds_places_lanes_side_by_side(suffix: str) -> None:
    size = TO_LDS[suffix]
    unit = max(size, 4)
    data = random_bytes(64 * 16, suffix)
    host = Host(data)
    vgprs = {2: [16 * (63 - lane) for lane in range(64)]}
    sgprs = {20: host.base & M32, 21: host.base >> 32}
    after = run_wave(f"global_load_lds_{suffix} v2, s[20:21]", vgprs, sgprs, m0=64, lds_size=64 + 64 * unit,
                     buffers=(host.buffer,))  # fmt: skip
    for lane in range(64):
        raw = data[16 * (63 - lane) : 16 * (63 - lane) + size]
        assert after.lds(64 + unit * lane, unit) == raw.ljust(unit, b"\0")


def test_buffer_load_to_lds_uses_m0_and_offset_and_zeroes_what_is_out_of_range() -> None:
    data = random_bytes(64 * 16, "lds")
    host = Host(data)
    vgprs = {2: [16 * lane for lane in range(64)]}
    after = run_wave("buffer_load_dwordx4 v2, s[20:23], 0 offen lds", vgprs, descriptor(host, records=512), m0=0x20,
                     lds_size=0x20 + 1024, lds=b"\xff" * 1056, buffers=(host.buffer,))  # fmt: skip
    assert after.lds(0x20, 1024) == data[:512] + bytes(512)


def test_descriptor_range_is_checked_dword_by_dword() -> None:
    """MI300 ISA guide: out-of-range loads give 0, out-of-range stores are dropped, each dword for itself."""
    data = random_bytes(256, "range")
    host = Host(data)
    vgprs = {2: [lane for lane in [232, 236, 240, 244, 248, 252, 256, 300] * 8]}
    after = run_wave("buffer_load_dwordx4 v[8:11], v2, s[20:23], 0 offen", vgprs, descriptor(host, records=248),
                     buffers=(host.buffer,))  # fmt: skip
    for lane, offset in enumerate(vgprs[2][:8]):
        for word in range(4):
            place = offset + 4 * word
            want = int.from_bytes(data[place : place + 4], "little") if place + 4 <= 248 else 0
            assert after.v(8 + word)[lane] == want
    values = {8 + k: [k + 1] * 64 for k in range(4)}
    run_wave("buffer_store_dwordx4 v[8:11], v2, s[20:23], 0 offen", {2: [240] * 64} | values,
             descriptor(host, records=248), exec_mask=1, buffers=(host.buffer,))  # fmt: skip
    assert host.bytes()[240:] == struct.pack("<2I", 1, 2) + data[248:]


def test_scalar_offset_counts_in_the_address_and_against_the_range() -> None:
    data = random_bytes(128, "soffset")
    host = Host(data)
    text = "buffer_load_dword v8, v2, s[20:23], s30 offen offset:4"
    sgprs = descriptor(host, records=64) | {30: 32}
    after = run_wave(text, {2: [0, 24, 28, 32] * 16}, sgprs, buffers=(host.buffer,))
    want = [int.from_bytes(data[36 + o : 40 + o], "little") if 36 + o + 4 <= 64 else 0 for o in (0, 24, 28, 32)]
    assert after.v(8)[:4] == want


def test_indexed_descriptor_multiplies_by_its_stride_and_checks_the_index() -> None:
    data = random_bytes(16 * 12, "stride")
    host = Host(data)
    vgprs = {2: [lane % 16 for lane in range(64)], 3: [4] * 64}
    after = run_wave("buffer_load_dword v8, v[2:3], s[20:23], 0 idxen offen", vgprs,
                     descriptor(host, records=10, stride=12),
                     buffers=(host.buffer,))  # fmt: skip
    for lane in range(16):
        want = int.from_bytes(data[12 * lane + 4 : 12 * lane + 8], "little") if lane < 10 else 0
        assert after.v(8)[lane] == want


def test_negative_offset_of_a_global_load() -> None:
    host = Host(random_bytes(128, "negative"))
    vgprs = {2: [64] * 64}
    after = run_wave("global_load_dword v8, v2, s[20:21] offset:-64", vgprs, {20: host.base & M32, 21: host.base >> 32},
                     buffers=(host.buffer,))  # fmt: skip
    assert after.v(8)[0] == int.from_bytes(host.bytes()[:4], "little")


@pytest.mark.parametrize("text", ["buffer_wbl2 sc0 sc1", "buffer_inv sc1", "buffer_wbl2 sc1", "buffer_inv sc0 sc1"])
def test_cache_control_reaches_the_port_with_its_bits(text: str) -> None:
    class Port:
        wants_waits = wants_turns = False

        def __init__(self) -> None:
            self.seen: list[tuple[str, bool, bool, list[int]]] = []

        def writeback(self, request: Any) -> None:
            self.seen.append(("wbl2", request.inst.sc0, request.inst.sc1, request.waves.tolist()))

        def invalidate(self, request: Any) -> None:
            self.seen.append(("inv", request.inst.sc0, request.inst.sc1, request.waves.tolist()))

    port = Port()
    run_wave(text, memory=port)
    assert port.seen == [(text.split()[0].removeprefix("buffer_"), "sc0" in text, "sc1" in text, [0])]


def test_waits_reach_a_port_that_wants_them() -> None:
    class Port:
        wants_turns, wants_waits = False, True
        seen: list[tuple[int | None, int | None]] = []  # noqa: RUF012

        def wait(self, request: Any, vmcnt: int | None, lgkmcnt: int | None) -> None:
            self.seen.append((vmcnt, lgkmcnt))

    run_wave("s_waitcnt vmcnt(3) lgkmcnt(0)\ns_waitcnt vmcnt(0)\ns_waitcnt 0xf70", memory=Port())
    assert Port.seen == [(3, 0), (0, None), (0, None)]
