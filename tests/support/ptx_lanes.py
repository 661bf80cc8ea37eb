"""A few PTX instructions for the 32 lanes of a warp, as the PTX ISA describes them; enough for `kernels/triton/mx_ptx`.

Registers hold 32-bit patterns as int64[32]. The matrix instruction adds in float64 and rounds once.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def floats(bits: Tensor) -> Tensor:
    """Bit patterns as fp32."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def patterns(value: Tensor) -> Tensor:
    """fp32 as bit patterns."""
    return value.to(torch.float32).view(torch.int32).to(torch.int64) & WORD


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The two bf16 of a word, low half first, as fp32."""
    return floats((bits & 0xFFFF) << 16), floats(bits & 0xFFFF0000)


def _bf16(value: Tensor) -> Tensor:
    return patterns(value.to(torch.bfloat16).float()) >> 16


class Warp:
    """Registers by name; `run` executes a text."""

    def __init__(self, registers: dict[str, Tensor]) -> None:
        self.registers = dict(registers)

    def run(self, text: str) -> None:
        """Every instruction in order; ValueError for one that is not known here."""
        plain = re.sub(r"\.reg[^;]*;", "", text).strip().removeprefix("{").removesuffix("}")
        for line in filter(None, (part.strip() for part in plain.split(";"))):
            name, rest = line.split(None, 1)
            if name.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"):
                self._multiply(*([r.strip() for r in group.split(",")] for group in re.findall(r"\{([^}]*)\}", rest)))
                continue
            target, *sources = (part.strip() for part in rest.split(","))
            self.registers[target] = self._result(name, sources, line)

    def _value(self, source: str) -> Tensor:
        if source in self.registers:
            return self.registers[source]
        number = int(source[2:], 16) if source.startswith("0f") else int(source, 0)
        return torch.full((32,), number & WORD, dtype=torch.int64)

    def _result(self, name: str, sources: list[str], line: str) -> Tensor:
        a, *rest = (self._value(source) for source in sources)
        match name:
            case "mov.b32" | "mov.f32":
                return a
            case "shl.b32":
                return a << rest[0] & WORD
            case "shr.u32":
                return a >> rest[0]
            case "and.b32":
                return a & rest[0]
            case "max.s32":
                return torch.maximum(a, rest[0])
            case "mul.lo.u32":
                return a * rest[0] & WORD
            case "mul.f32":
                return patterns(floats(a) * floats(rest[0]))
            case "add.f32":
                return patterns(floats(a) + floats(rest[0]))
            case "fma.rn.f32":
                return patterns((floats(a).double() * floats(rest[0]).double() + floats(rest[1]).double()).float())
            case "mul.rn.bf16x2":
                low, high = (_bf16(x * y) for x, y in zip(halves(a), halves(rest[0]), strict=True))
                return low | high << 16
            case "prmt.b32":
                pair, chosen = a | rest[0] << 32, int(sources[2], 0)
                return sum((pair >> 8 * (chosen >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))  # type: ignore[return-value]
        raise ValueError(line)

    def _multiply(self, d: list[str], a: list[str], b: list[str], c: list[str]) -> None:
        """Lane 4 g + q: rows g and g + 8, columns 2 q and 2 q + 1 (PTX ISA, fragments of mma.m16n8k16, bf16)."""
        left, right, total = torch.zeros(16, 16).double(), torch.zeros(16, 8).double(), torch.zeros(16, 8).double()
        places = [(lane, lane // 4, lane % 4) for lane in range(32)]
        for lane, g, q in places:
            for i, name in enumerate(a):
                row, column = g + 8 * (i % 2), 2 * q + 8 * (i // 2)
                left[row, column], left[row, column + 1] = (h[lane] for h in halves(self._value(name)))
            for i, name in enumerate(b):
                right[2 * q + 8 * i, g], right[2 * q + 8 * i + 1, g] = (h[lane] for h in halves(self._value(name)))
            for i, name in enumerate(c):
                total[g + 8 * (i // 2), 2 * q + i % 2] = floats(self._value(name))[lane]
        result = patterns((left @ right + total).float())
        for i, name in enumerate(d):
            self.registers[name] = torch.stack([result[g + 8 * (i // 2), 2 * q + i % 2] for _, g, q in places])
