"""Code of the MXFP4 kernels for sm_90, compiled here without a GPU: what their speed and their safety rest on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

_PROGRAM = """
import json, pathlib, subprocess, sys, tempfile, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from dieplace.kernels.triton import mx_kernels
types = {"x": "*i32", "ids": "*i32", "blocks": "*i32", "scales": "*u8", "bias": "*bf16", "out": "*bf16", "N": "i32",
         "alpha": "fp32", "limit": "fp32", "weights": "*fp32"}
forms = {
    "gemv": (1, {"K": 2880, "U": 1, "W": 1, "HAS_BIAS": True}),
    "gate_up": (1, {"H": 2880, "INNER": 2880, "U": 2, "W": 1}),
    "down": (4, {"H": 2880, "INNER": 2880, "C": 4, "U": 1, "W": 4, "HAS_BIAS": True}),
}
tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
for name, (warps, constants) in forms.items():
    for overlap in (False, True):
        kernel = getattr(mx_kernels, name)
        given = {**constants, "OVERLAP": overlap}
        names = kernel.arg_names
        signature = {n: "constexpr" if n in given else types[n] for n in names}
        attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
        source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in given.items()}, attrs)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            code = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
        print(json.dumps([name, overlap, code]), flush=True)
"""
# Predicates, then the opcode; nvdisasm puts the address before and the encoding behind.
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+(?:\.[A-Za-z0-9_]+)*)")


@pytest.fixture(scope="module")
def listings() -> dict[tuple[str, bool], list[str]]:
    """Opcodes by kernel and by whether it overlaps, up to the first end of the program: the exact form comes behind."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, so its kernels cannot be compiled")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(name, overlap): _OPCODE.findall(code) for name, overlap, code in rows}


@pytest.mark.slow
def test_every_weight_is_asked_for_before_the_first_multiplication(listings: dict) -> None:
    """ptxas would move loads down to where they are needed, and a program then waits for memory once a step."""
    for form, code in listings.items():
        first, last = code.index(next(o for o in code if o.startswith("HMMA"))), _last(code, "HMMA")
        loads = [i for i, opcode in enumerate(code) if opcode.startswith("LDG") and opcode.endswith(".128")]
        before = [i for i in loads if i < first]
        assert len(before) >= 6, form  # three steps of two rows
        assert not [i for i in loads if first < i < last], form


@pytest.mark.slow
def test_a_launch_waits_for_the_one_before_it_if_and_only_if_it_overlaps(listings: dict) -> None:
    """ACQBULK is griddepcontrol.wait, PREEXIT launch_dependents; nothing is stored before the wait."""
    for (name, overlap), code in listings.items():
        assert ("ACQBULK" in code) is overlap and ("PREEXIT" in code) is overlap
        if overlap:
            wait = code.index("ACQBULK")
            assert not [opcode for opcode in code[:wait] if opcode.startswith(("STG", "ATOM", "RED"))]
            # The experts' ids are written before gate_up, and down reads them before it waits.
            assert (code.index("PREEXIT") > wait) is (name == "gate_up")


def _last(code: list[str], opcode: str) -> int:
    return max(i for i, found in enumerate(code) if found.startswith(opcode))
