"""Reads what LLVM writes at the end of a kernel's assembly: registers, memory, limits and argument layout.

The text between `.amdgpu_metadata` and `.end_amdgpu_metadata` is the code object's metadata note as YAML (LLVM
AMDGPUUsage, "Code Object V5 Metadata"). LLVM emits one fixed shape, read here without a YAML library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dieplace.errors import CompileError

_BLOCK = re.compile(r"^\s*\.amdgpu_metadata\s*$(.*?)^\s*\.end_amdgpu_metadata", re.M | re.S)
_FIELD = re.compile(r"^\s*(?:- )?\.(\w+):\s*(.*?)\s*$")
_TRIVIAL = ("s_endpgm", "s_nop", "s_waitcnt", "s_code_end")


@dataclass(frozen=True)
class KernelArgument:
    """One argument of a kernel: byte offset and size in the argument block, and LLVM's value kind."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs of a compute unit; registers are per lane (VGPR, AGPR) or per wave (SGPR)."""

    name: str
    vgpr: int  # VGPRs and AGPRs together, as LLVM counts them on gfx90a and later
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    max_workgroup: int
    required_workgroup: tuple[int, ...] | None
    args: tuple[KernelArgument, ...]

    @property
    def threads(self) -> int:
        """The workgroup size the kernel was compiled for: the required one, else the largest allowed."""
        size = 1
        for extent in self.required_workgroup or (self.max_workgroup,):
            size *= extent
        return size


def read_kernels(isa: str) -> tuple[KernelResources, ...]:
    """Every kernel of an assembly text; CompileError when there is no metadata."""
    block = _BLOCK.search(isa)
    if block is None:
        raise CompileError("the compiler's assembly has no .amdgpu_metadata", hint="was the target an amdgcn one?")
    section = re.search(r"^amdhsa\.kernels:\s*$(.*?)^amdhsa\.", block.group(1), re.M | re.S)
    kernels = re.split(r"^  - ", section.group(1), flags=re.M)[1:] if section else []
    return tuple(_kernel("    " + text) for text in kernels)


def is_empty_body(isa: str, name: str) -> bool:
    """Whether the kernel does nothing: the sign of an operation that FlyDSL dropped without an exception."""
    body = re.search(rf"^{re.escape(name)}:.*?$(.*?)^\.Lfunc_end", isa, re.M | re.S)
    if body is None:
        raise CompileError(f"the compiler's assembly has no body for kernel {name}")
    for line in body.group(1).splitlines():
        words = line.split(";")[0].split()
        if words and not words[0].startswith(".") and not words[0].endswith(":") and words[0] not in _TRIVIAL:
            return False
    return True


def _kernel(text: str) -> KernelResources:
    top: dict[str, str] = {}
    args: list[dict[str, str]] = []
    required: list[int] = []
    section = ""
    for line in text.splitlines():
        field = _FIELD.match(line)
        if re.match(r"^    \.\w+:", line) and field:
            section = field.group(1)
            top[section] = field.group(2)
        elif section == "args" and field:
            if line.lstrip().startswith("- "):
                args.append({})
            args[-1][field.group(1)] = field.group(2)
        elif section == "reqd_workgroup_size" and line.strip().startswith("- "):
            required.append(int(line.strip()[2:]))

    def number(key: str) -> int:
        return int(top.get(key) or 0)

    return KernelResources(
        name=top["name"].strip("'\""),
        vgpr=number("vgpr_count"),
        agpr=number("agpr_count"),
        sgpr=number("sgpr_count"),
        vgpr_spills=number("vgpr_spill_count"),
        sgpr_spills=number("sgpr_spill_count"),
        lds_bytes=number("group_segment_fixed_size"),
        scratch_bytes=number("private_segment_fixed_size"),
        kernarg_bytes=number("kernarg_segment_size"),
        max_workgroup=number("max_flat_workgroup_size"),
        required_workgroup=tuple(required) or None,
        args=tuple(KernelArgument(int(a["offset"]), int(a["size"]), a["value_kind"]) for a in args),
    )
