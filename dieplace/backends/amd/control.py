"""Partition control of AMD cards: the same on a live and on an emulated node, with the roads of writing put in.

Reads are sysfs and KFD. A write goes through AMD's library where that is healthy and will do it, else through the
documented sysfs file with the same checks; which one is named in every plan.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dieplace.backends.amd.cards import PCI
from dieplace.backends.amd.holders import find_holders
from dieplace.backends.amd.observe import MODULE, observe
from dieplace.backends.amd.reload import ModprobeReloader, Reloader
from dieplace.backends.amd.smi import (
    Smi,
    answer_of,
    changeable_by_others,
    check_rocm_path,
    default_rocm,
    what_to_install,
)
from dieplace.backends.base import Holders
from dieplace.errors import Unsupported
from dieplace.partition.control import Answer, Clock, Road, SystemClock, Tick, silent
from dieplace.partition.facts import NodeFacts
from dieplace.partition.store import LIVE_DIRECTORY, Store
from dieplace.sysfs import Sysfs, errno_name

CAP_SYS_MODULE = 1 << 16  # include/uapi/linux/capability.h
# Before ROCm 7.0 (library 26) a memory set reloads the driver inside the call, past every check made here, and reports
# success when that reload failed (seen with 24.7). Such a library is never asked for it.
FIRST_LIBRARY_WITHOUT_RELOAD = 26
_FILES = {"compute": "current_compute_partition", "memory": "current_memory_partition"}


class Conversation(Protocol):
    """Something that answers like `Smi.ask`."""

    def ask(self, op: str, **request: str) -> dict[str, Any]: ...


class AmdControl:
    """Control of one node. `smi` None means that every write goes to sysfs, `road_name` is how that is told."""

    def __init__(
        self,
        sysfs: Sysfs,
        *,
        source: str,
        reloader: Reloader,
        smi: Conversation | None = None,
        clock: Clock | None = None,
        uid: int | None = None,
        road_name: str = "sysfs",
        store: Store,
        why_no_smi: str | None = None,
    ) -> None:
        self.sysfs, self.source, self.reloader, self.smi = sysfs, source, reloader, smi
        self.clock: Clock = clock or SystemClock()
        self.uid = os.geteuid() if uid is None else uid
        self.road_name = road_name
        self.store = store
        self.why_no_smi = why_no_smi
        self._ids: dict[str, str] = {}
        self._road: Road | None = None

    def pin(self, ids: Mapping[str, str]) -> None:
        """Use these card names (BDF to `gpuN`), so that a plan and the machine it came from agree."""
        self._ids |= ids

    def read(self, *, links: bool = False) -> NodeFacts:
        """The node now, with card names that stay while cards come and go."""
        facts = observe(self.sysfs, self._ids, links=links)
        self._ids |= {card.bdf: card.id for card in facts.cards}
        return facts

    def holders(self) -> Holders:
        """Who holds the cards; incomplete for anybody but root, who alone may look at other users' descriptors."""
        found = find_holders(self.sysfs, self.read())
        if self.uid == 0:
            return found
        return Holders(found.holders, (*found.incomplete, "only root sees every process's open files"))

    def privileged(self) -> bool:
        """Root, by this node's own notion of users."""
        return self.uid == 0

    def road(self) -> Road:
        """How writes will go; asks the library for its version at most once, in a child, without initialising it."""
        if self._road is None:
            self._road = self._choose_road()
        return self._road

    def _choose_road(self) -> Road:
        if self.smi is None:
            notes = (f"Writes go to sysfs, because {self.why_no_smi}.",) if self.why_no_smi else ()
            return Road(f"through {self.road_name}", f"through {self.road_name}", notes)
        reply = self.smi.ask("versions")
        if not reply["ok"]:
            note = f"Writes go to sysfs, because {what_to_install(reply)}."
            return Road("through sysfs", "through sysfs", (note,))
        versions: dict[str, str] = reply.get("versions", {})
        name = f"amdsmi {versions.get('library') or versions.get('binding') or '(version not stated)'}"
        major = versions.get("library", "").split(".")[0]
        either = f"through {name} (the sysfs file where the library does not support this board)"
        if major.isdigit() and int(major) >= FIRST_LIBRARY_WITHOUT_RELOAD:
            return Road(either, either, _drift(versions), versions)
        why = f"Library {versions.get('library', 'of unknown version')} may reload the driver inside a memory set, so"
        return Road(
            "through sysfs", either, (f"{why} the memory mode is written to sysfs.", *_drift(versions)), versions
        )

    def memories_of(self, bdf: str, compute: str) -> tuple[str, ...] | None:
        """Ask the driver's table by its selector `xcp_config`, which switches nothing, and put the selector back."""
        selector = f"{PCI}/{bdf}/compute_partition_config/xcp_config"
        before = self.sysfs.read_or_none(selector)
        try:
            self.sysfs.write(selector, compute)
            text = self.sysfs.read(selector.replace("xcp_config", "supported_nps_configs"))
        except OSError as error:
            # EINVAL: the driver knows no such compute mode here. Anything else: no such table on this kernel.
            return () if error.errno == errno.EINVAL else None
        finally:
            if before:
                with contextlib.suppress(OSError):
                    self.sysfs.write(selector, before)
        return tuple(word for part in text.split(",") if (word := part.strip()).startswith("NPS"))

    def set_memory(self, bdf: str, word: str) -> Answer:
        """Record a memory mode for the card's hive."""
        return self._set("memory", bdf, word)

    def set_compute(self, bdf: str, word: str) -> Answer:
        """Switch one card's compute mode."""
        return self._set("compute", bdf, word)

    def _set(self, kind: str, bdf: str, word: str) -> Answer:
        facts = self.read()
        if not facts.driver_loaded:
            # Never ask the library now: its init loops over 2^32 cards while /sys/class/drm has none (library 24.7).
            return Answer("absent", "sysfs", "the driver is not loaded")
        refused = self._library_checks(facts, kind, bdf, word)
        if refused is not None:
            return refused
        road = self.road()
        if self.smi is None or "amdsmi" not in getattr(road, kind):
            return self._write(kind, bdf, word)
        answer = answer_of(self.smi.ask(f"set-{kind}", bdf=bdf, word=word), road.versions)
        if answer.meaning == "absent" or answer.name == "NOT_SUPPORTED":
            # Nothing was written: the library lacks the board, the device or itself. The file answers for the driver.
            written = self._write(kind, bdf, word)
            return Answer(written.meaning, f"sysfs ({answer})", written.detail, written.code, written.name)
        return answer

    def _library_checks(self, facts: NodeFacts, kind: str, bdf: str, word: str) -> Answer | None:
        """What a current library checks before it writes, so that both roads refuse alike."""
        if not self.privileged():
            return Answer("denied", "dieplace", "needs root")
        card = next((card for card in facts.cards if card.bdf == bdf), None)
        if card is None:
            return Answer("absent", "dieplace", f"there is no card at {bdf}")
        if card.in_reset:
            return Answer("reset", "sysfs", "the card is in reset", errno.EPERM, "EPERM")
        offered = card.offered_memory if kind == "memory" else card.offered_compute
        if offered and word not in offered:
            return Answer("refused", "dieplace", f"the driver offers {', '.join(offered)}")
        return None

    def _write(self, kind: str, bdf: str, word: str) -> Answer:
        try:
            self.sysfs.write(f"{PCI}/{bdf}/{_FILES[kind]}", word)
        except OSError as error:
            return self._refused_write(bdf, error)
        return Answer("ok", self.road_name)

    def _refused_write(self, bdf: str, error: OSError) -> Answer:
        """errno of the driver's store functions (partition interface of amdgpu_gfx.c and amdgpu_gmc.c)."""
        code = error.errno or 0
        meaning = {
            errno.EINVAL: "refused",
            errno.EACCES: "refused",
            errno.EROFS: "refused",
            errno.EBUSY: "busy",
            errno.EIO: "broken",
            errno.ENXIO: "broken",
            errno.ENOENT: "absent",
            errno.ENODEV: "absent",
        }.get(code, "unknown")
        detail = (
            "the host or its provider does not allow it, root or not" if code in (errno.EACCES, errno.EROFS) else ""
        )
        if code == errno.EPERM:
            in_reset = any(card.bdf == bdf and card.in_reset for card in self.read().cards)
            meaning = "reset" if in_reset else "refused"
            detail = "the card is in reset" if in_reset else "not permitted, though the card is not in reset"
        return Answer(meaning, self.road_name, detail or error.strerror or "", code, errno_name(code))

    def versions(self) -> dict[str, str]:
        """dieplace, driver and kernel; binding and library where the road was chosen already."""
        from dieplace import __version__

        asked = self._road.versions if self._road else {}
        found = {
            "dieplace": __version__,
            "amdgpu": self.sysfs.read_or_none(f"{MODULE}/version"),
            "kernel": self.sysfs.read_or_none("/proc/sys/kernel/osrelease"),
            "amdsmi": asked.get("binding"),
            "libamd_smi": asked.get("library"),
        }
        not_stated = {"amdgpu": "not stated", "kernel": "not stated"}
        return {name: text for name, version in found.items() if (text := version or not_stated.get(name))}

    def unload(self, timeout_s: float, keep_open: tuple[int, ...] = (), tick: Tick = silent) -> Answer:
        """Unload the driver; nothing of ours is open: reads keep no descriptor, the library runs in a child."""
        return self.reloader.unload(timeout_s, keep_open, tick)

    def load(self, timeout_s: float, keep_open: tuple[int, ...] = (), tick: Tick = silent) -> Answer:
        """Load the driver."""
        return self.reloader.load(timeout_s, keep_open, tick)

    def unit_active(self, unit: str) -> bool | None:
        """Whether a unit runs."""
        return self.reloader.unit_active(unit)

    def stop_unit(self, unit: str) -> Answer:
        """Stop a unit that the user named."""
        return self.reloader.stop_unit(unit)

    def start_unit(self, unit: str) -> Answer:
        """Start a unit that was stopped here."""
        return self.reloader.start_unit(unit)


def _drift(versions: dict[str, str]) -> tuple[str, ...]:
    """A sentence when binding and library are of different releases: 6.4 is library 25, 7.x is 26, 10.x is 27."""
    binding, library = versions.get("binding", "").split(".")[0], versions.get("library", "").split(".")[0]
    expected = {"6": ("24", "25"), "7": ("26",), "10": ("27",)}.get(binding)
    if expected is None or not library or library in expected:
        return ()
    return (
        f"The Python package amdsmi {versions['binding']} does not belong to library {versions['library']}: install "
        "the package that came with this ROCm, or name its ROCm with --rocm-path.",
    )


def live_control(sysfs: Sysfs, *, rocm_path: str | None = None) -> AmdControl:
    """Control of the node this runs on; Unsupported for a tree that is not the live root."""
    if str(sysfs.root) != "/":
        raise Unsupported("this is a recording, not a node: there is nothing to switch", hint="use the live node")
    store = Store(LIVE_DIRECTORY, owner=0, shared=True)
    smi: Smi | None = Smi(check_rocm_path(rocm_path) if rocm_path else None)
    why = None
    default = Path(default_rocm() or "/") / "lib" / "libamd_smi.so"
    if rocm_path is None and os.geteuid() == 0 and default.exists() and (part := changeable_by_others(default)):
        smi, why = None, f"root does not load a library from {part}, which others may change"
    return AmdControl(sysfs, source="live", reloader=ModprobeReloader(), smi=smi, store=store, why_no_smi=why)
