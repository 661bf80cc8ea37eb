"""The real amdsmi and pyrsmi packages, unmodified, over a stub of AMD's library that acts on an emulated node."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from partition_support import FAST, FakeClock, small_node, truth
from stub_library import Library, build, short_folder, symbols

from dieplace.backends.amd.control import AmdControl
from dieplace.backends.amd.control_emulated import NodeReloader
from dieplace.backends.amd.smi import Smi, check_rocm_path, what_to_install
from dieplace.emulator.node import Node
from dieplace.errors import Busy, Pending, Unsupported, UsageError
from dieplace.modes import Mode
from dieplace.partition.entry import build as build_plan
from dieplace.partition.entry import carry_out, plan_restore
from dieplace.partition.plan import Plan
from dieplace.partition.store import Store

pytestmark = pytest.mark.real_binding


@pytest.fixture(scope="module")
def rocm() -> Iterator[Path]:
    folder = short_folder()
    yield build(folder / "rocm", folder / "s")
    shutil.rmtree(folder)


class Bench:
    """An emulated node whose mode writes go through the real binding in a real child process."""

    def __init__(
        self, home: Path, rocm: Path, *, timeout_s: float = 60.0, library: dict | None = None, **styles: object
    ):
        self.clock = FakeClock()
        self.node: Node = small_node(home / "node", self.clock, **styles)
        self.library = Library(self.node, rocm.parent / "s", **(library or {}))
        self.smi = Smi(str(rocm), timeout_s=timeout_s)
        self.control = AmdControl(
            self.node.sysfs(), source="emulated", reloader=NodeReloader(self.node), smi=self.smi, clock=self.clock,
            uid=0, store=Store(home / "state"),
        )  # fmt: skip

    def __enter__(self) -> Bench:
        self.library.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.library.__exit__()
        self.library.path.unlink()

    def plan(self, mode: str, cards: tuple[str, ...] | None = None) -> Plan:
        facts = self.control.read()
        names = cards or tuple(card.id for card in facts.cards)
        return build_plan(self.control, facts, dict.fromkeys(names, Mode.parse(mode)), allow_unvalidated=True)

    def set(self, mode: str, cards: tuple[str, ...] | None = None) -> tuple[str, ...]:
        return carry_out(self.plan(mode, cards), self.control, limits=FAST).said

    def asked(self, call: str) -> list[str]:
        return [line for line in self.library.calls if line.split()[0] == call]


@pytest.fixture
def bench(memory_path: Path, rocm: Path) -> Iterator[Bench]:
    with Bench(memory_path, rocm) as made:
        yield made


def test_the_stub_exports_what_the_wheel_takes() -> None:
    assert len(symbols()) >= 180  # 184 names in the 7.0.2 wheel


def test_up_and_back_through_the_real_binding(memory_path: Path, rocm: Path) -> None:
    with Bench(memory_path, rocm, cards=8) as bench:
        _up_and_back(bench)


def _up_and_back(bench: Bench) -> None:
    before = bench.control.read(links=True)
    plan = bench.plan("DPX/NPS2")
    assert "through amdsmi 26.0.2" in str(plan) and not bench.asked("set_memory")
    bench.set("DPX/NPS2")
    assert truth(bench.node).is_in("DPX/NPS2") and bench.asked("set_memory") == ["set_memory 1000 2"]
    assert bench.control.read().device_count == 16
    carry_out(plan_restore(bench.control), bench.control, limits=FAST)
    after = bench.control.read(links=True)
    assert truth(bench.node).is_in("SPX/NPS1")
    assert [c.devices for c in after.cards] == [c.devices for c in before.cards]
    assert bench.library.open_sessions == 0  # every init had its shutdown: nothing keeps a render node


def test_compute_goes_by_profile_index_looked_up_by_name(bench: Bench) -> None:
    bench.set("CPX/NPS1", ("gpu1",))
    assert truth(bench.node).compute == ("SPX", "CPX")
    assert bench.asked("set_profile") == ["set_profile 1008 3"] and not bench.asked("set_compute")


def test_without_profiles_compute_goes_by_the_older_call(bench: Bench) -> None:
    """Defect B2: with no profiles the 7.0.2 binding raises UnboundLocalError."""
    bench.library.no_profiles = True
    bench.set("QPX/NPS1", ("gpu0",))
    assert truth(bench.node).compute == ("QPX", "SPX") and bench.asked("set_compute") == ["set_compute 1000 4"]


def test_targets_are_found_by_address_in_any_order(memory_path: Path, rocm: Path) -> None:
    with Bench(memory_path, rocm, cards=3, library={"reverse": True}) as bench:
        bench.set("DPX/NPS1", ("gpu2",))
        assert truth(bench.node).compute == ("SPX", "SPX", "DPX")
        bench.set("CPX/NPS1", ("gpu2",))  # now two devices share the card, the secondary comes first
        assert bench.asked("set_profile")[-1] == "set_profile 1016 3" and truth(bench.node).compute[2] == "CPX"


def test_siblings_with_one_address_are_told_apart_by_partition_id(memory_path: Path, rocm: Path) -> None:
    with Bench(
        memory_path, rocm, mode="DPX/NPS2", partition_id="high", library={"same_bdf": True, "reverse": True}
    ) as b:
        b.set("QPX/NPS2", ("gpu1",))
        assert truth(b.node).compute == ("DPX", "QPX") and b.asked("set_profile") == ["set_profile 1008 2"]


def test_where_no_primary_can_be_singled_out_the_file_is_written(memory_path: Path, rocm: Path) -> None:
    with Bench(memory_path, rocm, mode="DPX/NPS2", library={"same_bdf": True, "blind_partition": True}) as bench:
        bench.set("QPX/NPS2", ("gpu1",))
        assert truth(bench.node).compute == ("DPX", "QPX")
        assert not bench.asked("set_profile") and not bench.asked("set_compute")


def test_binding_defect_b1_an_error_read_as_not_available(bench: Bench) -> None:
    """B1: the profile getter swallows NO_PERM and answers N/A and 0: that must read as unknown, never as a count."""
    bench.library.root = False
    devices = bench.smi.ask("list")["devices"]
    assert [device["partitions"] for device in devices] == [None, None]
    assert [device["compute"] for device in devices] == ["SPX", "SPX"]
    bench.library.root = True
    assert [device["partitions"] for device in bench.smi.ask("list")["devices"]] == [1, 1]


def test_binding_defect_b4_the_selector_is_left_at_the_last_mode(bench: Bench) -> None:
    """B4: asking for profiles writes the driver's selector and leaves it at CPX; no mode changes, no plan is misled."""
    bench.set("DPX/NPS1", ("gpu0",))
    facts = bench.control.read()
    assert facts.cards[0].selected == ("CPX", ("NPS1", "NPS2")) and truth(bench.node).compute == ("DPX", "SPX")
    bench.set("SPX/NPS1")
    bench.set("DPX/NPS2")
    assert truth(bench.node).is_in("DPX/NPS2")


def test_defects_b3_b5_b6_are_in_answers_that_are_never_read() -> None:
    from dieplace.backends.amd import smi_child

    text = Path(smi_child.__file__).read_text().replace("`resource_profiles` are wrong", "")
    for name in ("resource_profiles", "default_profile_index", "compute_process_gpus", "memory_caps"):
        assert name not in text


def test_secondaries_say_not_supported_and_that_is_normal(memory_path: Path, rocm: Path) -> None:
    with Bench(memory_path, rocm, cards=1, mode="DPX/NPS2") as bench:
        first, second = bench.smi.ask("list")["devices"]
        assert (first["compute"], first["partition"]) == ("DPX", 0)
        assert (second["compute"], second["partition"]) == (None, 1)


STATUSES = {30: ("busy", Busy), 1: ("refused", Unsupported), 10: ("refused", Unsupported), 55: ("refused", Unsupported)}


@pytest.mark.parametrize("status", STATUSES)
def test_a_refused_memory_set_changes_nothing(bench: Bench, status: int) -> None:
    bench.library.script["set_memory"] = [status]
    with pytest.raises(STATUSES[status][1]) as caught:
        bench.set("DPX/NPS2")
    assert caught.value.facts["outcome"] == "unchanged" and caught.value.facts["code"] == status
    assert truth(bench.node).is_in("SPX/NPS1")


@pytest.mark.parametrize("status", [0xFFFFFFFF, 42, 43, 54, 14])
def test_an_unclear_status_leaves_a_wish_that_may_be_there(bench: Bench, status: int) -> None:
    from dieplace.errors import NotVerified
    from dieplace.partition.journal import Record, standing

    bench.library.script["set_memory"] = [status]
    with pytest.raises(NotVerified) as caught:
        bench.set("DPX/NPS2")
    assert caught.value.facts["outcome"] == "unknown"
    assert any("may be pending" in text for text in standing(Record(bench.control.store), bench.control.read()))
    carry_out(plan_restore(bench.control), bench.control, limits=FAST)
    assert truth(bench.node).is_in("SPX/NPS1") and not Record(bench.control.store).wishes()


def test_a_success_that_did_nothing_is_never_reported_as_success(bench: Bench) -> None:
    bench.library.script["set_profile"] = [0]
    from dieplace.errors import RolledBack

    with pytest.raises(RolledBack, match="claims DPX on gpu0, but it reads SPX"):
        bench.set("DPX/NPS1", ("gpu0",))


def test_busy_is_retried_a_bounded_number_of_times(bench: Bench) -> None:
    bench.library.script["set_profile"] = [30, 30]
    bench.set("DPX/NPS1", ("gpu0",))
    assert len(bench.asked("set_profile")) == 3
    bench.library.script["set_profile"] = [30] * 9
    with pytest.raises(Busy):
        bench.set("CPX/NPS1", ("gpu0",))
    assert len(bench.asked("set_profile")) == 6


def test_row_45_therock_2964_a_hanging_init_ends_with_the_time_limit(memory_path: Path, rocm: Path) -> None:
    """TheRock 2964: init can hang. What a child that gave no answer did is not known, and told so."""
    from dieplace.errors import NotVerified

    with Bench(memory_path, rocm, timeout_s=3.0) as bench:
        plan = bench.plan("DPX/NPS2")
        bench.library.hang_in_init = 4.5
        with pytest.raises(NotVerified) as caught:
            carry_out(plan, bench.control, limits=FAST)
        assert "no answer within 3 s" in str(caught.value) and caught.value.facts["outcome"] == "unknown"
        assert set(truth(bench.node).wishes) == {None}


def test_the_library_is_never_asked_while_the_driver_is_away(bench: Bench) -> None:
    """12.3: init loops over 2^32 cards between unload and load."""
    bench.node.unload()
    bench.library.calls.clear()
    assert bench.control.set_compute(bench.node.bdfs()[0], "DPX").meaning == "absent"
    assert bench.library.calls == []


class TestLibrary247:
    """What reference trials saw library 24.7 do, under the real binding."""

    @pytest.fixture
    def old(self, memory_path: Path, rocm: Path) -> Iterator[Bench]:
        with Bench(memory_path, rocm, library={"old": True, "version": "24.7.0"}) as made:
            yield made

    def test_memory_goes_through_sysfs_and_the_plan_says_so(self, old: Bench) -> None:
        text = str(old.plan("DPX/NPS2"))
        assert "Library 24.7.0 may reload the driver inside a memory set" in text and "through sysfs" in text
        assert "does not belong to library 24.7.0" in text
        old.set("DPX/NPS2")
        assert truth(old.node).is_in("DPX/NPS2") and not old.asked("set_memory") and old.node.state.loads == 2

    def test_a_board_the_library_refuses_is_written_through_the_file(self, memory_path: Path, rocm: Path) -> None:
        """A 7.x library that refuses MI355X with status 2 as 24.7 did: the file is written, and named."""
        with Bench(memory_path, rocm, library={"script": {"set_memory": [2]}}) as bench:
            said = bench.set("DPX/NPS2")
            assert truth(bench.node).is_in("DPX/NPS2") and any("sysfs (amdsmi 26.0.2 says refused" in s for s in said)

    def test_a_secondary_would_switch_the_card_so_none_is_ever_addressed(self, memory_path: Path, rocm: Path) -> None:
        with Bench(
            memory_path, rocm, mode="DPX/NPS2", library={"old": True, "version": "24.7.0", "reverse": True}
        ) as b:
            b.set("CPX/NPS2", ("gpu0",))
            assert b.asked("set_profile") == ["set_profile 1000 3"] and truth(b.node).compute == ("CPX", "DPX")

    def test_einval_reported_as_unknown_is_read_back(self, old: Bench) -> None:
        """EINVAL arrives as 0xFFFFFFFF; nothing was changed, and that is verified rather than assumed."""
        from dieplace.errors import RolledBack

        old.library.script["set_profile"] = [0xFFFFFFFF]
        with pytest.raises(RolledBack):
            old.set("DPX/NPS1", ("gpu0",))
        assert truth(old.node).is_in("SPX/NPS1")

    def test_success_after_a_failed_reload_is_not_believed(self, memory_path: Path, rocm: Path) -> None:
        """The driver is in use, so the unload fails; the wish is told as pending, never as done."""
        with Bench(memory_path, rocm, part="MI300X", library={"old": True, "version": "24.7.0"}) as bench:
            plan = bench.plan("DPX/NPS2")
            bench.node.inject("unload", "EAGAIN")
            with pytest.raises(Pending):
                carry_out(plan, bench.control, limits=FAST)
            assert truth(bench.node).wishes == ("NPS2",)


def test_a_missing_library_is_told_with_what_to_install(tmp_path: Path) -> None:
    """7.0.2 without its library: two lines on stdout, then KeyError. A plan still works, by the file."""
    reply = Smi(str(tmp_path)).ask("versions")
    assert not reply["ok"] and reply["stage"] == "import" and "KeyError" in reply["text"]
    assert "amd-smi-lib" in what_to_install(reply) and "--rocm-path" in what_to_install(reply)


def test_a_library_without_cpu_names_is_told(memory_path: Path) -> None:
    """Built without its CPU part the library lacks names, and the binding dies with AttributeError at import."""
    folder = short_folder()
    rocm = build(folder / "rocm", folder / "s", leave_out=("amdsmi_get_cpu_hsmp_proto_ver",))
    reply = Smi(str(rocm)).ask("versions")
    shutil.rmtree(folder)
    assert not reply["ok"] and "AttributeError" in reply["text"] and "same release" in what_to_install(reply)


def test_a_rocm_that_others_can_change_is_not_loaded_by_root(tmp_path: Path, rocm: Path) -> None:
    with pytest.raises(UsageError, match=r"no lib/libamd_smi\.so"):
        check_rocm_path(str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libamd_smi.so").write_bytes(b"")
    (tmp_path / "lib").chmod(0o777)
    import os

    if os.geteuid() == 0:
        with pytest.raises(UsageError, match="may be changed by others"):
            check_rocm_path(str(tmp_path))


def test_the_callers_environment_does_not_choose_the_library(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROCM_PATH", "ROCM_HOME", "LD_LIBRARY_PATH", "AMDSMI_LIB_OVERRIDE", "PYTHONPATH"):
        monkeypatch.setenv(name, "/nonexistent")
    assert bench.smi.ask("versions")["versions"] == {"binding": "7.0.2", "library": "26.0.2"}
    monkeypatch.setenv("ROCM_PATH", str(bench.smi.rocm_path))
    assert not Smi(None).ask("versions")["ok"]


def test_pyrsmi_reads_power_and_nothing_else(bench: Bench) -> None:
    reply = bench.smi.telemetry()
    assert reply["ok"], reply
    assert [device["power_w"] for device in reply["devices"]] == [700.0, 701.0]
    assert [device["utilisation_percent"] for device in reply["devices"]] == [None, None]
    assert not [line for line in bench.library.calls if line.startswith("set_")]


def test_pyrsmi_without_a_library_is_no_failure_of_ours(tmp_path: Path) -> None:
    assert not Smi(str(tmp_path)).telemetry()["ok"]
