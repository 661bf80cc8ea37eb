"""The library's child process against bindings written to the published signatures of other releases.

Only 7.0.2 is run as a real package (test_partition_binding). Here small packages stand in for 6.1, 6.4, 7.14 and 10.x,
each with the calls that its changelog says it has, and for bindings that hang, print, crash or lie.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dieplace.backends.amd.smi import CHILD, Smi, answer_of, clean_environment, what_to_install

COMMON = """
import enum, sys, os, json
LOG = {log!r}
def log(*a):
    with open(LOG, "a") as f: f.write(" ".join(map(str, a)) + "\\n")
class AmdSmiInitFlags(enum.IntEnum):
    INIT_AMD_GPUS = 2
class AmdSmiException(Exception): pass
class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, code): self.err_code = code; super().__init__("code %d" % code)
class AmdSmiTimeoutException(AmdSmiLibraryException):
    def __init__(self): Exception.__init__(self, "timeout")
class AmdSmiMemoryPartitionType(enum.IntEnum):
    NPS1 = 1; NPS2 = 2; NPS4 = {nps4}; NPS8 = 8
def amdsmi_init(flag): assert isinstance(flag, AmdSmiInitFlags); log("init")
def amdsmi_shut_down(): log("shut_down")
def amdsmi_get_processor_handles(): return ["h0", "h1"]
def amdsmi_get_gpu_device_bdf(h): return dict(h0="0000:15:00.0", h1="0000:05:00.0")[h]
def amdsmi_get_lib_version(): return dict(major={major}, minor=1, release=2, build="x")
def amdsmi_set_gpu_memory_partition(h, v): log("set_memory_partition", h, v.name)
"""
OLD_COMPUTE = """
class AmdSmiComputePartitionType(enum.IntEnum):  # up to 6.3 this enum began with CPX
    CPX = 1; SPX = 2; DPX = 3; TPX = 4; QPX = 5
def amdsmi_get_gpu_compute_partition(h): return "SPX"
def amdsmi_set_gpu_compute_partition(h, v): log("set_compute_partition", h, v.name)
"""
NEW = """
def amdsmi_get_gpu_kfd_info(h): return dict(kfd_id=1, node_id=2, current_partition_id=0)
def amdsmi_set_gpu_memory_partition_mode(h, v): log("set_memory_partition_mode", h, v.name)
def amdsmi_get_gpu_accelerator_partition_profile_config(h):
    names = ["SPX", "DPX", "QPX", "CPX"]
    return dict(num_profiles=4, default_profile_index=0, resource_profiles=[],
                profiles=[dict(profile_type=n, profile_index=i, num_partitions=1) for i, n in enumerate(names)])
def amdsmi_set_gpu_accelerator_partition_profile(h, i): assert isinstance(i, int); log("set_profile", h, i)
"""
TEN = """
import warnings
def amdsmi_set_gpu_compute_partition(h, v): warnings.warn("deprecated", DeprecationWarning); log("deprecated call")
"""
RELEASES = {
    "6.1": (COMMON + OLD_COMPUTE, "24", "set_compute_partition h1 DPX", "set_memory_partition h1 NPS2"),
    "6.4": (COMMON + OLD_COMPUTE + NEW, "25", "set_profile h1 1", "set_memory_partition_mode h1 NPS2"),
    "7.14": (COMMON + OLD_COMPUTE + NEW, "26", "set_profile h1 1", "set_memory_partition_mode h1 NPS2"),
    "10.0": (COMMON + NEW + TEN, "27", "set_profile h1 1", "set_memory_partition_mode h1 NPS2"),
}


def rocm(folder: Path, text: str, major: str = "26") -> tuple[Smi, Path]:
    """A ROCm folder that carries its own binding in share/amd_smi, as ROCm does."""
    package = folder / "share" / "amd_smi" / "amdsmi"
    package.mkdir(parents=True)
    log = folder / "log"
    filled = text.replace("{log!r}", repr(str(log))).replace("{major}", major).replace("{nps4}", "3")
    (package / "__init__.py").write_text(filled)
    return Smi(str(folder), timeout_s=20.0), log


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_is_called_as_it_publishes(tmp_path: Path, release: str) -> None:
    text, major, compute, memory = RELEASES[release]
    smi, log = rocm(tmp_path, text, major)
    assert smi.ask("versions")["versions"]["library"] == f"{major}.1.2"
    assert not log.exists()  # no init for a version
    assert smi.ask("set-compute", bdf="0000:05:00.0", word="DPX")["ok"]
    assert smi.ask("set-memory", bdf="0000:05:00.0", word="NPS2")["ok"]
    assert log.read_text().splitlines() == ["init", compute, "shut_down", "init", memory, "shut_down"]


def test_a_card_that_is_not_listed_is_not_guessed(tmp_path: Path) -> None:
    smi, log = rocm(tmp_path, COMMON + NEW)
    reply = smi.ask("set-compute", bdf="0000:25:00.0", word="DPX")
    assert not reply["ok"] and reply["stage"] == "find" and answer_of(reply, {}).meaning == "absent"
    assert "set" not in log.read_text()


def test_a_binding_without_the_enum_or_the_call_says_so(tmp_path: Path) -> None:
    smi, _ = rocm(tmp_path, COMMON)
    reply = smi.ask("set-compute", bdf="0000:05:00.0", word="DPX")
    assert not reply["ok"] and "knows no compute mode DPX" in reply["text"]
    assert answer_of(reply, {}).meaning == "unknown"


def test_what_the_binding_prints_goes_nowhere(tmp_path: Path) -> None:
    smi, _ = rocm(tmp_path, COMMON + NEW + "\nprint('noise'); os.write(1, b'more\\n'); os.write(2, b'err\\n')\n")
    assert smi.ask("versions")["ok"]


@pytest.mark.parametrize(
    ("body", "stage", "words"),
    [
        ("raise KeyError('libamd_smi.so')", "import", "KeyError"),
        ("raise OSError('no library')", "import", "OSError"),
        ("raise AttributeError('amdsmi_get_cpu_x')", "import", "AttributeError"),
        ("raise SystemExit(3)", "child", "gave no answer"),
        ("import os; os.kill(os.getpid(), 11)", "child", "signal 11"),
        ("import os; os._exit(0)", "child", "status 0"),
    ],
)
def test_every_way_to_fail_at_import_is_an_answer(tmp_path: Path, body: str, stage: str, words: str) -> None:
    smi, _ = rocm(tmp_path, body)
    reply = smi.ask("versions")
    assert not reply["ok"] and reply["stage"] == stage and words in reply["text"]
    assert what_to_install(reply)


def test_a_late_loader_fails_at_its_first_call(tmp_path: Path) -> None:
    """7.14 and later: import succeeds without a library, the first call raises OSError."""
    late = COMMON + NEW + "\ndef amdsmi_get_lib_version(): raise OSError('libamd_smi.so.26: cannot open')\n"
    reply = rocm(tmp_path, late)[0].ask("versions")
    assert not reply["ok"] and reply["stage"] == "import" and "libamd_smi.so.26" in what_to_install(reply)


def test_statuses_keep_number_and_name_or_class(tmp_path: Path) -> None:
    failing = COMMON + NEW + "\ndef amdsmi_init(flag): raise AmdSmiLibraryException(34)\n"
    reply = rocm(tmp_path / "a", failing)[0].ask("list")
    assert (reply["stage"], reply["code"]) == ("init", 34) and answer_of(reply, {}).meaning == "absent"
    timing = COMMON + NEW + "\ndef amdsmi_set_gpu_memory_partition_mode(h, v): raise AmdSmiTimeoutException()\n"
    reply = rocm(tmp_path / "b", timing)[0].ask("set-memory", bdf="0000:05:00.0", word="NPS2")
    assert (reply["code"], reply["name"]) == (8, "TIMEOUT") and answer_of(reply, {}).meaning == "unknown"


def test_a_hang_is_ended_and_means_not_knowing(tmp_path: Path) -> None:
    body = COMMON + NEW + "\nimport time\ndef amdsmi_init(flag):\n    log('pid', os.getpid())\n    time.sleep(60)\n"
    smi, log = rocm(tmp_path, body)
    reply = Smi(smi.rocm_path, timeout_s=2.0).ask("set-memory", bdf="0000:05:00.0", word="NPS2")
    assert reply["stage"] == "child" and answer_of(reply, {}).meaning == "unknown"
    pid = int(log.read_text().split()[1])
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("sentinel", ["0xFFFFFFFF", "0", "'N/A'", "None"])
def test_row_34_rocm_systems_8529_a_count_that_means_nothing_is_unknown(tmp_path: Path, sentinel: str) -> None:
    body = (
        COMMON
        + OLD_COMPUTE
        + NEW
        + (
            "\ndef amdsmi_get_gpu_accelerator_partition_profile(h):\n"
            f"    profile = dict(profile_type='N/A', num_partitions={sentinel})\n"
            "    return dict(partition_id=[0], partition_profile=profile)\n"
        )
    )
    devices = rocm(tmp_path, body)[0].ask("list")["devices"]
    assert [device["partitions"] for device in devices] == [None, None]


def test_uninitialised_addresses_never_match(tmp_path: Path) -> None:
    """24.7 answers garbage with status 0 where a render node cannot be opened."""
    garbage = COMMON + NEW + "\ndef amdsmi_get_gpu_device_bdf(h): return '7f143fd0:f8:08.0'\n"
    reply = rocm(tmp_path, garbage)[0].ask("set-compute", bdf="0000:05:00.0", word="DPX")
    assert reply["stage"] == "find"


def test_the_child_imports_nothing_of_ours_and_sees_a_clean_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = (
        COMMON
        + NEW
        + (
            "\nours = [m for m in sys.modules if m.startswith('dieplace')]\n"
            "log(json.dumps([dict(os.environ), os.getcwd(), sys.flags.isolated, ours]))\n"
        )
    )
    smi, log = rocm(tmp_path, probe)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/evil")
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("PYTHONSTARTUP", "/evil")
    assert smi.ask("versions")["ok"]
    environment, folder, isolated, ours = json.loads(log.read_text())
    assert set(environment) == {*clean_environment(), "ROCM_PATH", "ROCM_HOME"} and folder == "/"
    assert isolated == 1 and ours == []


def test_the_child_answers_a_wrong_request(tmp_path: Path) -> None:
    for text in ("{}", "[]", "nonsense", '{"op": "format-disk", "rocm_path": "/nonexistent"}'):
        run = subprocess.run([sys.executable, "-I", str(CHILD), text], capture_output=True, timeout=60, check=False)
        assert json.loads(run.stdout)["ok"] is False and run.stderr == b""


def test_a_python_that_cannot_be_started_is_an_answer() -> None:
    assert Smi(None, python="/nonexistent/python").ask("versions")["stage"] == "child"
