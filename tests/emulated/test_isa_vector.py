"""Every vector ALU mnemonic against plain Python references: all encodings, active and inactive lanes."""

from __future__ import annotations

import math
import random
import re

import pytest
from isa_bench import ALL, run_wave
from isa_integers import define_all
from isa_numbers import FORMATS, WIDTH, samples, to_float, ulps
from isa_references import Case

import dieplace.emulator.isa.opcodes  # noqa: F401
from dieplace.emulator.isa.table import OPCODES

CASES = define_all()
SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa)$")
MASKS = (ALL, 0xF0F0_3C5A_0000_FFF1)
VECTOR = sorted(name for name, opcode in OPCODES.items() if opcode.kind == "valu" and SUFFIX.sub("", name) in CASES)
DST, FIRST = 8, 16


def operand_values(case: Case, seed: str) -> list[list[int]]:
    values = []
    for number, kind in enumerate(case.src):
        if kind == "mask":
            values.append([random.Random(f"{seed}{lane}").getrandbits(1) for lane in range(64)])
        elif kind.startswith("pk"):
            low, high = (samples(kind[2:], f"{seed}{number}{half}") for half in (0, 1))
            values.append([a | b << 16 for a, b in zip(low, high, strict=True)])
        else:
            values.append([case.domain.get(number, int)(v) for v in samples(kind, f"{seed}{number}")])
    return values


def as_mask(bits: list[int]) -> int:
    return sum(int(bool(bit)) << lane for lane, bit in enumerate(bits))


def equal(got: int, want: int, kind: str, ulp: int) -> bool:
    if kind.startswith("pk"):
        return all(equal(got >> k & 0xFFFF, want >> k & 0xFFFF, kind[2:], ulp) for k in (0, 16))
    if kind not in FORMATS:
        return got == want
    distance = ulps(got, want, FORMATS[kind])
    if distance <= ulp:
        return True
    # sin and cos near a multiple of pi: an absolute error of a few units of the largest result
    return ulp == 2 and math.isclose(to_float(got, FORMATS[kind]), to_float(want, FORMATS[kind]), abs_tol=2.0**-22)


class Bench:
    """Text and registers of one instruction under test."""

    def __init__(self, mnemonic: str, case: Case) -> None:
        self.mnemonic, self.case = mnemonic, case
        found = SUFFIX.search(mnemonic)
        self.encoding = found.group(1) if found else ""
        self.values = operand_values(case, mnemonic)
        self.vgprs: dict[int, list[int]] = {}
        self.vcc: int | None = None
        self.sgprs: dict[int, int] = {}
        self.junk = random.Random(mnemonic)
        self.old = [self.junk.getrandbits(32) for _ in range(64)], [self.junk.getrandbits(32) for _ in range(64)]
        self.vgprs[DST], self.vgprs[DST + 1] = self.old
        self.text = self._text()

    def _text(self) -> str:
        vector_mask = self.encoding in ("e32", "sdwa", "dpp")
        names = []
        for kind in self.case.dst:
            names.append(("vcc" if vector_mask else "s[24:25]") if kind == "mask" else self._register(DST, kind))
        given = self.case.src[:-1] if self.case.reads_dst else self.case.src
        for number, kind in enumerate(given):
            names.append(self._source(number, kind, vector_mask))
        if self.case.reads_dst:
            self._set(DST, self.case.src[-1], self.values[-1])
        return f"{self.mnemonic} {', '.join(names)}{self._modifiers(given)}"

    def _source(self, number: int, kind: str, vector_mask: bool) -> str:
        if kind == "mask":
            bits = as_mask(self.values[number])
            if vector_mask:
                self.vcc = bits
                return "vcc"
            self.sgprs |= {20: bits & 0xFFFFFFFF, 21: bits >> 32}
            return "s[20:21]"
        if self.mnemonic.startswith(("v_fmaak", "v_fmamk")) and number == (2 if "ak" in self.mnemonic else 1):
            self.values[number] = [0x3FC00000] * 64
            return "0x3fc00000"
        register = FIRST + 4 * number
        self._set(register, kind, self.values[number])
        return self._register(register, kind)

    def _set(self, register: int, kind: str, values: list[int]) -> None:
        if WIDTH.get(kind) == 64:
            self.vgprs[register] = [v & 0xFFFFFFFF for v in values]
            self.vgprs[register + 1] = [v >> 32 for v in values]
            if register == DST:
                self.old = self.vgprs[DST], self.vgprs[DST + 1]
        elif WIDTH.get(kind) == 16:
            high = self.encoding == "sdwa" and register != DST
            self.vgprs[register] = [
                v << 16 | self.junk.getrandbits(16) if high else v | self.junk.getrandbits(16) << 16 for v in values
            ]
            if register == DST:
                self.old = self.vgprs[DST], self.old[1]
        else:
            self.vgprs[register] = list(values)
            if register == DST:
                self.old = self.vgprs[DST], self.old[1]

    @staticmethod
    def _register(number: int, kind: str) -> str:
        return f"v[{number}:{number + 1}]" if WIDTH.get(kind) == 64 else f"v{number}"

    def _modifiers(self, given: tuple[str, ...]) -> str:
        if self.encoding == "dpp":
            order = [1, 0, 3, 2]
            self.values[0] = [self.values[0][(lane & ~3) + order[lane & 3]] for lane in range(64)]
            return " quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1"
        if self.encoding != "sdwa":
            return self.case.modifiers
        text = ""
        if self.case.dst[0] != "mask":
            half = WIDTH.get(self.case.dst[0]) == 16
            text += " dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE" if half else " dst_sel:DWORD dst_unused:UNUSED_PAD"
        for number, kind in enumerate(given[:2]):
            select = "DWORD"
            if WIDTH.get(kind) == 16:
                select = "WORD_1"
            elif kind in ("u32", "i32"):
                select = ("BYTE_2", "WORD_1")[number]
                shift, mask = ((16, 0xFF), (16, 0xFFFF))[number]
                self.values[number] = [v >> shift & mask for v in self.values[number]]
            if kind != "mask":
                text += f" src{number}_sel:{select}"
        return text

    def expected(self, mask: int) -> list[list[int | None]]:
        """Per destination and lane; None where the lane is inactive."""
        out: list[list[int | None]] = [[None] * 64 for _ in self.case.dst]
        for lane in range(64):
            if not mask >> lane & 1:
                continue
            if self.encoding == "dpp" and not mask >> (lane ^ 1) & 1:
                args = [0, *[v[lane] for v in self.values[1:]]]
            else:
                args = [v[lane] for v in self.values]
            result = self.case.ref(*args)
            results = result if isinstance(result, tuple) else (result,)
            for place, value in enumerate(results):
                out[place][lane] = int(value)
        return out


@pytest.mark.parametrize("mnemonic", VECTOR)
def test_vector_instruction_matches_its_published_description(mnemonic: str) -> None:
    case = CASES[SUFFIX.sub("", mnemonic)]
    for mask in MASKS:
        bench = Bench(mnemonic, case)
        vcc = bench.vcc if bench.vcc is not None else 0
        after = run_wave(bench.text, bench.vgprs, {**bench.sgprs, 24: 7, 25: 7}, exec_mask=mask, vcc=vcc)
        want = bench.expected(mask)
        for place, kind in enumerate(case.dst):
            if kind == "mask":
                got = after.vcc if "vcc," in bench.text.replace(" ", "") else after.s64(24)
                assert got == as_mask([x or 0 for x in want[place]]), bench.text
                if mnemonic.startswith("v_cmpx"):
                    assert after.exec == got
                continue
            check_lanes(bench, after, want[place], kind)


def check_lanes(bench: Bench, after: object, want: list[int | None], kind: str) -> None:
    case, old = bench.case, bench.old
    got = after.v64(DST) if WIDTH.get(kind) == 64 else after.v(DST)  # type: ignore[attr-defined]
    for lane in range(64):
        before = old[0][lane] | old[1][lane] << 32 if WIDTH.get(kind) == 64 else old[0][lane]
        value = want[lane]
        args = [hex(v[lane]) for v in bench.values]
        where = f"{bench.text}: lane {lane}, sources {args}"
        if value is None:
            assert got[lane] == before, f"{where}: an inactive lane changed"
        elif WIDTH.get(kind) == 16:
            low, high = (got[lane] & 0xFFFF, got[lane] >> 16)
            if bench.encoding == "sdwa":
                low, high = high, low
                assert high == before & 0xFFFF, f"{where}: the other half changed"
            else:
                assert high == (before >> 16 if case.keeps_high else 0), f"{where}: upper half {high:#x}"
            assert equal(low, value, kind, case.ulp), f"{where}: {low:#x} is not {value:#x}"
        else:
            assert equal(got[lane], value, kind, case.ulp), f"{where}: {got[lane]:#x} is not {value:#x}"
