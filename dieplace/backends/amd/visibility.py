"""Which devices a process sees, and under which index: the three visibility variables, as ROCr and HIP apply them.

Two filters in a row. ROCr (`ROCR_VISIBLE_DEVICES`, core/runtime/amd_filter_device.cpp): set but empty hides all; a
token is a number in C notation or a prefix of `GPU-<16 hex>` in any case; a bad, repeated or ambiguous token ends the
list. HIP (`HIP_VISIBLE_DEVICES`, where that is unset or empty `CUDA_VISIBLE_DEVICES`, rocclr device/rocm/rocdevice.cpp)
applies to what is left: a token is a plain decimal or a part of the UUID in the same case; a repeated one is ignored, a
bad one ends the list, a UUID that matches several takes the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_C_NUMBER = re.compile(r"^\s*[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)$")


@dataclass(frozen=True)
class Entry:
    """A device in the runtime's walk order: our id, and its KFD `unique_id` (None or 0: it has no UUID)."""

    id: str
    unique_id: int | None = None

    @property
    def uuid(self) -> str:
        """As the runtime prints it, `GPU-` and 16 lower-case hex digits."""
        return f"GPU-{self.unique_id:016x}" if self.unique_id else "GPU-XX"


@dataclass(frozen=True)
class Visible:
    """`order`: device ids by HIP index; `rocr_order` before HIP's filter; `notes`: each variable that took part."""

    order: tuple[str, ...]
    rocr_order: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def index(self, device: str) -> int | None:
        """The predicted HIP index of a device, None where it is hidden."""
        return self.order.index(device) if device in self.order else None


def visible(entries: Sequence[Entry], environ: Mapping[str, str]) -> Visible:
    """Apply the variables of `environ` to devices in the runtime's walk order."""
    notes: list[str] = []
    after_rocr = list(entries)
    if "ROCR_VISIBLE_DEVICES" in environ:
        text = environ["ROCR_VISIBLE_DEVICES"]
        after_rocr, why = _rocr(entries, text)
        notes.append(_told("ROCR_VISIBLE_DEVICES", text, after_rocr, entries, why))
    name = next((n for n in VARIABLES[1:] if environ.get(n)), None)
    after_hip = after_rocr
    if name is not None:
        after_hip, why = _hip(after_rocr, environ[name])
        notes.append(_told(name, environ[name], after_hip, after_rocr, why))
    return Visible(tuple(e.id for e in after_hip), tuple(e.id for e in after_rocr), tuple(notes))


def _rocr(entries: Sequence[Entry], text: str) -> tuple[list[Entry], str | None]:
    chosen: list[Entry] = []
    if not text:
        return chosen, None
    for raw in text.split(",")[: len(entries)]:  # ROCr looks at no more tokens than there are devices
        token = raw.strip().upper()
        found = _by_prefix(entries, token) if token.startswith("G") else _by_number(entries, token)
        if isinstance(found, str):
            return chosen, f"the list ends at {raw.strip()!r}, which {found}"
        if found in chosen:
            return chosen, f"the list ends at {raw.strip()!r}, which is there twice"
        chosen.append(found)
    return chosen, None


def _by_prefix(entries: Sequence[Entry], token: str) -> Entry | str:
    matches = [e for e in entries if e.unique_id and e.uuid.upper().startswith(token)]
    if not 5 <= len(token) <= 20 or not matches:
        return "matches no device"
    return matches[0] if len(matches) == 1 else f"matches {len(matches)} devices"


def _by_number(entries: Sequence[Entry], token: str) -> Entry | str:
    if not _C_NUMBER.match(token):
        return "is not a number"
    index = _c_integer(token)
    return entries[index] if index is not None and 0 <= index < len(entries) else "is no device"


def _c_integer(token: str) -> int | None:
    """What `strtol(token, &end, 0)` gives: 0x is hexadecimal, a leading 0 is octal."""
    sign = -1 if token.startswith("-") else 1
    digits = token.strip().lstrip("+-").lower()
    try:
        if digits.startswith("0x"):
            return sign * int(digits, 16)
        return sign * int(digits, 8 if digits.startswith("0") and digits != "0" else 10)
    except ValueError:
        return None


def _hip(entries: Sequence[Entry], text: str) -> tuple[list[Entry], str | None]:
    chosen: list[Entry] = []
    tokens = text.split(",")
    if tokens[-1] == "":
        tokens.pop()  # the loop ends at the end of the text, so one trailing comma is harmless
    for token in tokens:
        found = next((e for e in entries if "GPU-" in token and token in e.uuid), None)
        if found is None and re.fullmatch("0|[1-9][0-9]{0,8}", token):
            found = entries[int(token)] if int(token) < len(entries) else None
        if found is None:
            return chosen, f"the list ends at {token!r}, which is no device"
        if found not in chosen:
            chosen.append(found)
    return chosen, None


def _told(name: str, text: str, after: Sequence[Entry], before: Sequence[Entry], why: str | None) -> str:
    ending = f"; {why}" if why else ""
    return f"{name}={text!r} leaves {len(after)} of {len(before)} devices{ending}"
