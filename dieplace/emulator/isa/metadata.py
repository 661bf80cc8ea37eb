"""What the ISA text says about a kernel besides its instructions: directives and the metadata YAML that ends it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dieplace.errors import CompileError

_DIRECTIVE = re.compile(r"^\s*\.amdhsa_(\w+)\s+(\d+)", re.MULTILINE)
_ITEM = re.compile(r"^\s*(?:- )?\.(\w+):\s*(.*)$")


@dataclass(frozen=True)
class KernelArgument:
    """One entry of the kernel-argument segment; `kind` is the metadata's value_kind."""

    offset: int
    size: int
    kind: str
    name: str | None = None

    @property
    def is_hidden(self) -> bool:
        """True for what the runtime fills in (block counts, group sizes)."""
        return self.kind.startswith("hidden_")


@dataclass(frozen=True)
class Metadata:
    """Resources and arguments of one kernel, in registers, bytes and work-items."""

    name: str
    arguments: tuple[KernelArgument, ...]
    kernarg_bytes: int
    lds_bytes: int
    scratch_bytes: int
    vgprs: int
    agprs: int
    sgprs: int
    allocated_vgprs: int
    max_workgroup: int
    initial_sgprs: tuple[str | int | None, ...]


def parse_metadata(text: str, name: str) -> Metadata:
    """Read directives and metadata of kernel `name`; CompileError says what is missing or not modelled."""
    directives = _directives(text, name)
    fields, arguments = _yaml(text, name)

    def number(key: str, default: int) -> int:
        return int(fields.get(key, default))

    total = directives.get("next_free_vgpr", number("vgpr_count", 256))
    accum = directives.get("accum_offset", 0)
    agprs = number("agpr_count", max(0, total - accum) if accum else 0)
    vgprs = max(1, min(total, accum) if accum and agprs else total)
    _refuse(directives, name)
    granule = 8  # VGPRs are allocated in units of 8 on gfx90a and later (LLVM AMDGPU usage)
    return Metadata(
        name=name,
        arguments=tuple(arguments),
        kernarg_bytes=number("kernarg_segment_size", directives.get("kernarg_size", 0)),
        lds_bytes=directives.get("group_segment_fixed_size", number("group_segment_fixed_size", 0)),
        scratch_bytes=directives.get("private_segment_fixed_size", 0),
        vgprs=vgprs,
        agprs=agprs,
        sgprs=number("sgpr_count", 104),
        allocated_vgprs=-(-max(total, 1) // granule) * granule,
        max_workgroup=number("max_flat_workgroup_size", 1024),
        initial_sgprs=_initial_sgprs(directives),
    )


def _directives(text: str, name: str) -> dict[str, int]:
    match = re.search(rf"^\s*\.amdhsa_kernel\s+{re.escape(name)}\s*$(.*?)^\s*\.end_amdhsa_kernel", text, re.M | re.S)
    if match is None:
        return {}
    return {key: int(value) for key, value in _DIRECTIVE.findall(match.group(1))}


def _yaml(text: str, name: str) -> tuple[dict[str, str], list[KernelArgument]]:
    """The kernel's entry under amdhsa.kernels; LLVM writes it with one key a line, so no YAML library is needed."""
    start = text.find(".amdgpu_metadata")
    if start < 0:
        return {}, []
    for block in re.split(r"^  - ", text[start:], flags=re.M)[1:]:
        fields, arguments = _entry(block)
        if fields.get("name") == name:
            return fields, arguments
    return {}, []


def _entry(block: str) -> tuple[dict[str, str], list[KernelArgument]]:
    fields: dict[str, str] = {}
    found: list[dict[str, str]] = []
    for line in block.splitlines():
        item = _ITEM.match(line)
        if item is None:
            continue
        depth = len(line) - len(line.lstrip())
        if depth >= 6:
            if line.lstrip().startswith("- "):
                found.append({})
            if found:
                found[-1][item.group(1)] = item.group(2).strip()
        else:
            fields[item.group(1)] = item.group(2).strip()
    arguments = [
        KernelArgument(int(a["offset"]), int(a["size"]), a["value_kind"], a.get("name")) for a in found if "offset" in a
    ]
    return fields, arguments


# User SGPRs in the order in which the hardware fills them, with their sizes (LLVM AMDGPU usage, "Initial Kernel
# State").
_USER_SGPRS = (("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
               ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1))  # fmt: skip
# Compilers reserve these in kernels that never look at them. They stay as never written: reading one is a fault.
_NOT_PROVIDED = ("dispatch_ptr", "queue_ptr", "dispatch_id")


def _initial_sgprs(directives: dict[str, int]) -> tuple[str | int | None, ...]:
    """What each SGPR holds at the start: `kernarg_lo`, a kernel-argument byte offset (preload), or a workgroup id.

    None is a register that the kernel reserved for what the interpreter does not provide.
    """
    held: list[str | int | None] = []
    for what, size in _USER_SGPRS[:4]:
        if what == "kernarg_segment_ptr":
            held += ["kernarg_lo", "kernarg_hi"] if directives.get(f"user_sgpr_{what}", 1) else []
        elif directives.get(f"user_sgpr_{what}"):
            held += [None] * size
    first = directives.get("user_sgpr_kernarg_preload_offset", 0)
    held += [None] * (2 if directives.get("user_sgpr_dispatch_id") else 0)
    held += [4 * (first + k) for k in range(directives.get("user_sgpr_kernarg_preload_length", 0))]
    missing = directives.get("user_sgpr_count", len(held)) - len(held)
    held += [0] * max(0, missing)
    held += [axis for axis in "xyz" if directives.get(f"system_sgpr_workgroup_id_{axis}", int(axis == "x"))]
    return tuple(held)


def _refuse(directives: dict[str, int], name: str) -> None:
    harmless = ("kernarg_segment_ptr", "private_segment_size", *_NOT_PROVIDED)
    for what, _ in _USER_SGPRS:
        if what not in harmless and directives.get(f"user_sgpr_{what}"):
            raise CompileError(
                f"kernel {name} asks for user SGPRs {what}, which the interpreter does not provide",
                hint="FlyDSL kernels do not need them; pass what is needed as an argument",
            )
    if directives.get("private_segment_fixed_size") or directives.get("enable_private_segment"):
        raise CompileError(f"kernel {name} uses scratch memory", hint="reduce register pressure until nothing spills")
    if directives.get("float_denorm_mode_32", 3) != 3 or directives.get("float_round_mode_32", 0) != 0:
        raise CompileError(
            f"kernel {name} asks for another floating-point mode than round-to-nearest with denormals",
            hint="compile with the default mode",
        )
