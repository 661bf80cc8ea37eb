"""Every mnemonic of the opcode table has a test whose expected value does not come from the interpreter."""

from __future__ import annotations

import re

from isa_integers import define_all
from isa_scalar import CASES as SCALAR
from isa_scalar import SAVEEXEC
from isa_tables import covered

import dieplace.emulator.isa.opcodes  # noqa: F401
from dieplace.emulator.isa.table import OPCODES

SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa)$")


def test_every_mnemonic_has_a_test() -> None:
    tested = set(define_all()) | set(SCALAR) | {f"s_{name}_saveexec_b64" for name in SAVEEXEC} | covered()
    known = {SUFFIX.sub("", name) for name in OPCODES}
    assert known - tested == set(), "mnemonics without a test"
    assert tested - known == set(), "tests of mnemonics that the interpreter does not have"
    assert len(known) > 900
