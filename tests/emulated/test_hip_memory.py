"""The AMD memory group over an emulated HIP runtime: classes, sizes, peers, full domains, accounting, lifetimes."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hip_machine import hip_machine
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_hip import CALLS, Stub, build

from dieplace.backends.amd.backend import AmdBackend
from dieplace.backends.amd.hip import Hip
from dieplace.backends.amd.hip_types import SIGNATURES
from dieplace.backends.amd.hsa import Hsa
from dieplace.backends.emulated import EmulatedBackend
from dieplace.backends.runtime import RuntimeFailed
from dieplace.emulator.node import create
from dieplace.errors import DomainFull, Misplaced, PlacementError, StaleMachine, Unsupported, UsageError
from dieplace.machine import Machine
from dieplace.policy import Policy
from dieplace.residency import audit
from dieplace.syncflags import SyncFlags

pytestmark = pytest.mark.real_binding
MIB = 1 << 20
GIB = 1 << 30
TOTAL = 144 * GIB  # one die of an MI355X


@pytest.fixture(scope="module")
def base() -> Iterator[Machine]:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as folder:
        yield EmulatedBackend(create(Path(folder) / "n", cards=1, mode="DPX/NPS2"), environ={}).snapshot()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(build(tmp_path_factory.mktemp("hip")))


@pytest.fixture
def dpx(base: Machine, stub: Stub, tmp_path: Path) -> Machine:
    return hip_machine(base, stub, tmp_path, total_bytes=TOTAL, pid=os.getpid())


def place(machine: Machine, nbytes: int, policy: Policy, role: str = "weights", **options: object):
    return machine.allocate(nbytes, device="gpu0/p0", policy=policy, role=role, **options)  # type: ignore[arg-type]


# -- the stub stands for the runtime -----------------------------------------------------------------------------------


def test_the_stub_has_every_call_in_use() -> None:
    assert set(SIGNATURES) <= {name for name, *_ in CALLS}


def test_constants_and_layouts_are_those_of_amds_own_binding() -> None:
    hip = pytest.importorskip(
        "rocm.bindings.hip", reason="rocm-bindings-hip, an independent source of HIP's constants, is not installed"
    )
    from dieplace.backends.amd import hip_types as t

    assert hip.hipError_t.hipErrorOutOfMemory == t.OUT_OF_MEMORY
    assert hip.hipError_t.hipErrorPeerAccessAlreadyEnabled == t.PEER_ALREADY_ENABLED
    codes = hip.hipError_t.hipErrorStreamCaptureUnsupported, hip.hipError_t.hipErrorStreamCaptureImplicit
    assert codes == t.IN_CAPTURE
    assert hip.hipMemAllocationType.hipMemAllocationTypePinned == t.ALLOCATION_PINNED
    assert hip.hipMemLocationType.hipMemLocationTypeDevice == t.LOCATION_DEVICE
    assert hip.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite == t.ACCESS_READ_WRITE
    assert hip.hipMemAllocationGranularity_flags.hipMemAllocationGranularityRecommended == t.GRANULARITY_RECOMMENDED
    assert hip.hipIpcMemLazyEnablePeerAccess == t.IPC_LAZY_PEER_ACCESS
    kinds = {0: "Unregistered", 1: "Host", 2: "Device", 3: "Managed"}
    for number, word in kinds.items():
        assert getattr(hip.hipMemoryType, f"hipMemoryType{word}") == number
    assert {n: w.lower() for n, w in kinds.items() if n} == {n: w for n, w in t.MEMORY_KINDS.items() if n}


def test_amds_own_binding_understands_the_stub(dpx: Machine, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub's layouts, read by code that is not ours."""
    hip = pytest.importorskip("rocm.bindings.hip", reason="rocm-bindings-hip is not installed")
    paths = importlib.import_module("rocm.bindings.util.paths")
    monkeypatch.setattr(paths, "get_library_path", lambda name: str(stub.path).encode())
    wanted = hip.hipMemAllocationProp()
    wanted.type = hip.hipMemAllocationType.hipMemAllocationTypePinned
    wanted.location.type, wanted.location.id = hip.hipMemLocationType.hipMemLocationTypeDevice, 1
    error, handle = hip.hipMemCreate(4 * MIB, wanted, 0)
    assert error == hip.hipError_t.hipSuccess and stub.used(1) == 4 * MIB
    assert hip.hipMemRelease(handle)[0] == hip.hipError_t.hipSuccess
    error, pointer = hip.hipExtMallocWithFlags(100, 3)
    error, found = hip.hipPointerGetAttributes(pointer)
    assert found.type == hip.hipMemoryType.hipMemoryTypeDevice and found.device == 0 and not found.isManaged
    hip.hipFree(pointer)
    assert stub.empty()


# -- classes, sizes and homes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 65, 2 * MIB, 2_267_136, 16_764_871])
def test_local_coarse_memory_is_whole_objects_by_hipmalloc(dpx: Machine, stub: Stub, nbytes: int) -> None:
    buffer = place(dpx, nbytes, Policy.local())
    objects = (nbytes + 2 * MIB - 1) // (2 * MIB)
    assert stub.log("hipMalloc") == [f"hipMalloc 0 {objects * 2 * MIB}"]
    assert (stub.used(0), stub.used(1)) == (objects * 2 * MIB, 0)
    found = audit(buffer).require_placed("accounted")
    assert found.bytes_by_domain() == {"gpu0/mem0": nbytes} and found.evidence == "accounted"
    buffer.free()
    assert stub.empty() and stub.used(0) == 0


def test_peer_memory_is_a_range_on_the_other_die_for_the_executing_one(dpx: Machine, stub: Stub) -> None:
    buffer = place(dpx, 5 * MIB, Policy.peer())
    buffer.tensor.fill_(7)
    assert stub.log("hipMemCreate") == [f"hipMemCreate 1 {6 * MIB}"] and not stub.log("hipMalloc")
    assert stub.log("hipMemSetAccess")[0].endswith(" 2"), "both devices are granted access"
    assert audit(buffer).require_placed("accounted").bytes_by_domain() == {"gpu0/mem1": 5 * MIB}
    assert not stub.log("hipDeviceEnablePeerAccess"), "a range grants access itself, not the whole device"


def test_interleave_alternates_objects(dpx: Machine, stub: Stub) -> None:
    buffer = place(dpx, 7 * MIB, Policy.interleave("gpu0/mem0", "gpu0/mem1"))
    assert stub.log("hipMemCreate") == [f"hipMemCreate {device} {2 * MIB}" for device in (0, 1, 0, 1)]
    assert audit(buffer).require_placed("accounted").bytes_by_domain() == {"gpu0/mem0": 4 * MIB, "gpu0/mem1": 3 * MIB}


def test_flags_are_uncached_device_memory_a_line_each(dpx: Machine, stub: Stub) -> None:
    flags = SyncFlags(dpx, "gpu0/p0", 64)
    assert stub.log("hipExtMallocWithFlags") == [f"hipExtMallocWithFlags 0 {2 * MIB} 3"]
    addresses = [flags.words[i].data_ptr() for i in range(64)]
    assert {b - a for a, b in pairwise(addresses)} == {128} and addresses[0] % 128 == 0
    flags.put(5, 1.5, flags.next_tag())
    assert flags.read(5) == (1.5, 1) and flags.read(6) == (0.0, 0)
    (item,) = audit(flags).items
    assert (item.role, item.evidence, item.misplaced_bytes) == ("sync_flag", "accounted", 0)


@pytest.mark.parametrize("with_hsa", [True, False])
def test_uncached_that_comes_back_from_the_host_is_refused_and_freed(
    base: Machine, stub: Stub, tmp_path: Path, with_hsa: bool
) -> None:
    machine = hip_machine(base, stub, tmp_path, total_bytes=TOTAL, pid=os.getpid(), with_hsa=with_hsa)
    stub.set("uncached_on_host", 1)
    with pytest.raises(PlacementError, match="host memory") as caught:
        SyncFlags(machine, "gpu0/p0", 4)
    assert type(caught.value) is PlacementError and stub.empty()
    assert len(stub.log("hipFree")) == 1


def test_flags_on_the_peer_enable_access_once_for_the_one_pair(dpx: Machine, stub: Stub) -> None:
    flags = [SyncFlags(dpx, "gpu0/p0", 1, policy=Policy.peer()) for _ in range(3)]
    assert stub.log("hipDeviceEnablePeerAccess") == ["hipDeviceEnablePeerAccess 0 1"]
    assert audit(*flags).require_placed("accounted").bytes_by_domain() == {"gpu0/mem1": 3 * 128}
    assert stub.log("hipExtMallocWithFlags") == [f"hipExtMallocWithFlags 1 {2 * MIB} 3"] * 3


def test_peer_access_that_is_on_already_is_success(dpx: Machine, stub: Stub) -> None:
    stub.fail("hipDeviceEnablePeerAccess", 1, 704)
    assert SyncFlags(dpx, "gpu0/p0", 1, policy=Policy.peer()).count == 1


@pytest.mark.parametrize("role", ["weights", "sync_flag"])
def test_refused_peer_access_names_both_and_takes_nothing(dpx: Machine, stub: Stub, role: str) -> None:
    stub.set("no_peer", 0, 1)
    with pytest.raises(PlacementError, match=r"device 0 .* device 1 \(gpu0/mem1\)"):
        place(dpx, MIB, Policy.peer(), role)
    assert stub.empty()
    place(dpx, MIB, Policy.local(), role)


def test_host_memory_and_odd_requests_are_refused_before_any_call(dpx: Machine, stub: Stub) -> None:
    stub.clear()
    for policy, options, kind in (
        (Policy.on("host/node0"), {}, PlacementError),
        (Policy.local(), {"memory_class": "fine"}, UsageError),
        (Policy.interleave("gpu0/mem0", "gpu0/mem1"), {"memory_class": "uncached"}, UsageError),
    ):
        with pytest.raises(kind):
            place(dpx, 4 * MIB, policy, **options)
    with pytest.raises(UsageError):
        place(dpx, 0, Policy.local())
    assert not stub.log("hipMalloc", "hipExtMallocWithFlags", "hipMemCreate", "hipMemAddressReserve")


def test_torch_makes_no_flags(dpx: Machine) -> None:
    with pytest.raises(PlacementError, match="go stale"), dpx.device("gpu0/p0").local(role="sync_flag"):
        pass


def test_devices_that_are_not_where_discovery_saw_them(base: Machine, stub: Stub, tmp_path: Path) -> None:
    moved = replace(base, devices=tuple(replace(d, bdf="0000:77:00.0") for d in base.devices))
    machine = hip_machine(moved, stub, tmp_path, total_bytes=TOTAL, pid=os.getpid())
    stub.library.stub_device(0, b"0000:05:00.0", 1, 2)
    with pytest.raises(StaleMachine, match="0000:77"):
        place(machine, MIB, Policy.local())


def test_a_hidden_peer_is_told(base: Machine, stub: Stub, tmp_path: Path) -> None:
    p0, p1 = base.devices
    hidden = replace(base, devices=(p0, replace(p1, runtime_index=None)))
    machine = hip_machine(hidden, stub, tmp_path, total_bytes=TOTAL, pid=os.getpid())
    with pytest.raises(PlacementError, match=r"gpu0/p1.* hidden"):
        place(machine, MIB, Policy.peer())


def test_an_old_runtime_and_a_missing_one_are_unsupported(dpx: Machine, stub: Stub) -> None:
    stub.set("version", 50_700_000)
    with pytest.raises(Unsupported, match="too old"):
        Hip(str(stub.path))
    with pytest.raises(Unsupported, match="cannot be used"):
        Hip("/nowhere/libamdhip64.so")


def test_the_callers_current_device_is_put_back(dpx: Machine, stub: Stub) -> None:
    hip = Hip(str(stub.path))
    hip._call("hipSetDevice", 1)
    place(dpx, MIB, Policy.local()).free()
    with pytest.raises(RuntimeFailed):
        hip.free(0, 4096)
    assert hip._int("hipGetDevice") == 1


# -- every call fails once ---------------------------------------------------------------------------------------------

# Uses in one allocation of three objects on two devices.
_USES = {
    "hipDeviceGetPCIBusId": 2,
    "hipDeviceCanAccessPeer": 1,
    "hipMemAddressReserve": 1,
    "hipMemCreate": 3,
    "hipMemMap": 3,
    "hipMemSetAccess": 3,
}


@pytest.mark.parametrize(("call", "nth"), [(call, n + 1) for call, uses in _USES.items() for n in range(uses)])
def test_a_call_that_fails_in_a_range_leaves_nothing(dpx: Machine, stub: Stub, call: str, nth: int) -> None:
    stub.fail(call, nth, 999)
    if (call, nth) in (("hipMemSetAccess", 2), ("hipMemSetAccess", 3)):
        place(dpx, 6 * MIB, Policy.peer_share(4)).free()  # tried once more from the base
    else:
        with pytest.raises(RuntimeFailed) as caught:
            place(dpx, 6 * MIB, Policy.peer_share(4))
        assert (caught.value.facts["call"], caught.value.facts["code"]) == (call, 999)
        assert len(stub.log(call)) == nth
    assert stub.empty() and (stub.used(0), stub.used(1)) == (0, 0)
    place(dpx, 6 * MIB, Policy.peer_share(4)).free()
    assert stub.empty()


def test_a_call_that_fails_for_plain_memory(dpx: Machine, stub: Stub) -> None:
    stub.fail("hipMalloc", 1, 999)
    with pytest.raises(RuntimeFailed, match=r"hipMalloc failed: hipErrorUnknown \(999\)"):
        place(dpx, MIB, Policy.local())
    stub.fail("hipExtMallocWithFlags", 1, 2)
    stub.fail("hipExtMallocWithFlags", 2, 2)  # the retry too
    with pytest.raises(DomainFull):
        place(dpx, MIB, Policy.local(), "sync_flag")
    assert stub.empty()


@pytest.mark.parametrize("policy", [Policy.local(), Policy.peer()])
def test_a_failure_after_the_memory_was_taken_gives_it_back(dpx: Machine, stub: Stub, policy: Policy) -> None:
    session = dpx.session.memory  # type: ignore[union-attr]
    read, calls = session.counters, []

    def broken() -> object:
        calls.append(1)
        if len(calls) == 2:  # the reading after
            raise OSError("the counters are gone")
        return read()

    session.counters = broken
    with pytest.raises(OSError, match="gone"):
        place(dpx, MIB, policy)
    assert len(calls) == 2 and stub.empty() and (stub.used(0), stub.used(1)) == (0, 0)


# -- full domains ------------------------------------------------------------------------------------------------------


def test_one_byte_too_many_is_domain_full_with_its_numbers(base: Machine, stub: Stub, tmp_path: Path) -> None:
    machine = hip_machine(base, stub, tmp_path, total_bytes=16 * MIB, pid=os.getpid())
    kept = place(machine, 14 * MIB, Policy.local())
    with pytest.raises(DomainFull) as caught:
        place(machine, 2 * MIB + 1, Policy.local())
    facts = caught.value.facts
    assert (facts["asked_bytes"], facts["free_bytes"], facts["total_bytes"]) == (2 * MIB + 1, 2 * MIB, 16 * MIB)
    assert facts["domain"] == "gpu0/mem0" and stub.used(0) == 14 * MIB
    place(machine, 2 * MIB, Policy.local()).free()
    kept.free()
    assert stub.empty()


def test_out_of_memory_in_the_second_of_three_objects(base: Machine, stub: Stub, tmp_path: Path) -> None:
    machine = hip_machine(base, stub, tmp_path, total_bytes=16 * MIB, pid=os.getpid())
    far = machine.allocate(16 * MIB, device="gpu0/p1", policy=Policy.local(), role="weights")
    with pytest.raises(DomainFull) as caught:
        place(machine, 6 * MIB, Policy.interleave("gpu0/mem0", "gpu0/mem1"))
    assert caught.value.facts["domain"] == "gpu0/mem1" and caught.value.facts["free_bytes"] == 0
    assert (stub.used(0), stub.used(1)) == (0, 16 * MIB)
    assert stub.log("hipMemCreate")[:2] == [f"hipMemCreate 0 {2 * MIB}", f"hipMemCreate 1 {2 * MIB}"]
    far.free()
    assert stub.empty()


def test_spill_puts_whole_objects_on_the_peer_and_the_audit_says_so(base: Machine, stub: Stub, tmp_path: Path) -> None:
    machine = hip_machine(base, stub, tmp_path, total_bytes=16 * MIB, pid=os.getpid())
    full = place(machine, 10 * MIB, Policy.local())
    buffer = place(machine, 9 * MIB, Policy.local(spill="peer"))
    (item,) = audit(buffer).items
    assert item.bytes_by_domain == {"gpu0/mem0": 6 * MIB, "gpu0/mem1": 3 * MIB} and item.misplaced_bytes == 3 * MIB
    buffer.tensor.fill_(1)
    full.free(), buffer.free()
    assert stub.empty()


def test_a_silent_spill_is_seen_by_the_counters(dpx: Machine, stub: Stub) -> None:
    """ROCm/amdgpu issue 186: 40 of 93 GiB land on the neighbour, and every call succeeds."""
    stub.set("spill", 40 * GIB, 1)
    with pytest.raises(DomainFull, match="gpu0/mem1"):
        place(dpx, 93 * GIB, Policy.local())
    assert stub.empty() and (stub.used(0), stub.used(1)) == (0, 0)
    allowed = place(dpx, 93 * GIB, Policy.local(spill="peer"))
    (item,) = audit(allowed).items
    assert item.bytes_by_domain == {"gpu0/mem0": 53 * GIB, "gpu0/mem1": 40 * GIB}
    assert (item.misplaced_bytes, item.evidence) == (40 * GIB, "accounted")
    with pytest.raises(Misplaced):
        audit(allowed).require_placed("accounted")


def test_declared_alone_never_passes(base: Machine, stub: Stub, tmp_path: Path) -> None:
    machine = hip_machine(base, stub, tmp_path, total_bytes=TOTAL, pid=1, with_counters=False)
    stub.set("spill", 40 * GIB, 1)
    buffer = place(machine, 93 * GIB, Policy.local())
    found = audit(buffer)
    assert found.evidence == "declared" and not found.misplaced, "nothing here can see the spill"
    assert "ENOENT" in buffer.locate().note
    with pytest.raises(Misplaced, match="only declared"):
        found.require_placed("accounted")


def test_the_layer_below_contradicting_the_request_is_misplaced(dpx: Machine, stub: Stub) -> None:
    buffer = place(dpx, MIB, Policy.local())
    held = buffer._allocation.token
    assert held.owner is not None and held.owner.node == dpx.device("gpu0/p0").kfd_node
    held.owner = replace(held.owner, node=int(dpx.device("gpu0/p1").kfd_node or 0))
    (item,) = audit(buffer).items
    assert item.misplaced_bytes == MIB and "gpu0/mem1" in buffer.locate().note


def test_memory_nobody_placed_and_managed_memory(dpx: Machine, stub: Stub) -> None:
    place(dpx, MIB, Policy.local())
    session = dpx.session.memory  # type: ignore[union-attr]
    address = stub.managed(MIB)
    found = session.unplaced(address, MIB)
    assert found.bytes_by_domain == {"gpu0/mem0": MIB} and "managed" in found.note and found.evidence == "declared"
    assert session.find(address) is None and session.unplaced(1 << 40, 1) is None
    assert Hsa(str(stub.path)).owner(1 << 40) is None


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def test_memory_goes_after_its_last_view_and_a_synchronise(dpx: Machine, stub: Stub) -> None:
    buffer = place(dpx, MIB, Policy.local())
    view = buffer.tensor
    view.fill_(9)
    part = view[100:200]
    buffer.free()
    del view, buffer
    gc.collect()
    assert not stub.log("hipFree") and int(part.sum()) == 900
    stub.clear()
    del part
    calls = [line.split()[0] for line in stub.log() if line.split()[0] not in ("hipGetDevice", "hipSetDevice")]
    assert calls == ["hipDeviceSynchronize", "hipFree"] and stub.empty()


def test_a_range_is_freed_after_both_devices_were_synchronised(dpx: Machine, stub: Stub) -> None:
    buffer = place(dpx, MIB, Policy.peer())
    stub.clear()
    buffer.free()
    calls = [line.split()[0] for line in stub.log() if line.split()[0] not in ("hipGetDevice", "hipSetDevice")]
    assert calls == ["hipDeviceSynchronize"] * 2 + ["hipMemUnmap", "hipMemRelease", "hipMemAddressFree"]
    assert {line for line in stub.log("hipDeviceSynchronize")} == {"hipDeviceSynchronize 0", "hipDeviceSynchronize 1"}


def test_in_a_capture_nothing_is_allocated_and_frees_wait(base: Machine, stub: Stub, tmp_path: Path) -> None:
    capture = threading.Event()
    options = {"total_bytes": TOTAL, "pid": os.getpid(), "capturing": capture.is_set}
    machine = hip_machine(base, stub, tmp_path, **options)  # type: ignore[arg-type]
    before = place(machine, MIB, Policy.local())
    capture.set()
    for policy in (Policy.local(), Policy.peer()):
        with pytest.raises(PlacementError, match="captured"):
            place(machine, MIB, policy)
    stub.clear()
    before.free()
    assert stub.log() == [], "no call at all while capturing"
    capture.clear()
    place(machine, MIB, Policy.local()).free()
    assert stub.empty()


def test_a_capture_of_another_thread_defers_the_free_and_refuses_the_allocation(dpx: Machine, stub: Stub) -> None:
    buffer = place(dpx, MIB, Policy.peer())
    stub.set("capturing", 1)
    buffer.free()
    assert not stub.log("hipMemUnmap") and not stub.empty()
    with pytest.raises(PlacementError, match="captured"):
        place(dpx, MIB, Policy.local())
    stub.set("capturing", 0)
    place(dpx, MIB, Policy.local()).free()
    assert stub.empty()


def test_a_collection_inside_a_locked_call_only_queues(dpx: Machine, stub: Stub) -> None:
    first = place(dpx, MIB, Policy.local())
    session = dpx.session.memory  # type: ignore[union-attr]
    with session.lifetimes.locked():
        del first
        gc.collect()
        assert not stub.log("hipFree")
    assert len(stub.log("hipFree")) == 1 and stub.empty()


def test_threads_allocate_and_free_without_loss(dpx: Machine, stub: Stub) -> None:
    failures: list[BaseException] = []

    def work(policy: Policy) -> None:
        try:
            for _ in range(25):
                buffer = place(dpx, 3 * MIB, policy)
                tensor = buffer.tensor.fill_(1)
                buffer.free()
                assert int(tensor[-1]) == 1
        except BaseException as error:
            failures.append(error)

    policies = (Policy.local(), Policy.peer(), Policy.peer_share(4), Policy.local())
    threads = [threading.Thread(target=work, args=(policy,)) for policy in policies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and stub.empty() and (stub.used(0), stub.used(1)) == (0, 0)


_PROGRAM = """
import os, sys
sys.path[:0] = {support!r}
from pathlib import Path
from hip_machine import hip_machine
from stub_hip import Stub
from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.errors import UsageError
from dieplace.policy import Policy
folder = Path({folder!r})
base = EmulatedBackend(create(folder / "n", cards=1, mode="DPX/NPS2"), environ={{}}).snapshot()
stub = Stub(Path({library!r}))
machine = hip_machine(base, stub, folder, total_bytes=1 << 30, pid=os.getpid())
buffer = machine.allocate(1 << 20, device="gpu0/p0", policy=Policy.peer(), role="weights")
tensor = buffer.tensor
"""


def _run(stub: Stub, folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    support = [str(Path(__file__).resolve().parents[1] / "support")]
    program = _PROGRAM.format(support=support, folder=str(folder), library=str(stub.path)) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_interpreter_exit_with_live_tensors_is_quiet(stub: Stub, memory_path: Path) -> None:
    done = _run(stub, memory_path, "import builtins; builtins.kept = (buffer, tensor[5:])\nprint('end')\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_forked_child_frees_nothing_and_is_told(stub: Stub, memory_path: Path) -> None:
    body = """
        stub.clear()
        pid = os.fork()
        if pid == 0:
            del tensor
            buffer.free()
            try:
                machine.allocate(1, device="gpu0/p0", policy=Policy.local(), role="weights")
            except UsageError as error:
                os._exit(0 if "forked" in str(error) and stub.log() == [] else 3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        tensor.fill_(1)
        del tensor
        buffer.free()
        assert stub.empty()
        """
    done = _run(stub, memory_path, body)
    assert done.returncode == 0, done.stderr


# -- any sequence ------------------------------------------------------------------------------------------------------

_POLICIES = (Policy.local(), Policy.peer(), Policy.peer_share(3), Policy.interleave("gpu0/mem1", "gpu0/mem0"))
_STEP = st.tuples(
    st.sampled_from(["take", "spill", "movable", "free", "move"]), st.integers(0, 3), st.integers(1, 24 * MIB)
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(_STEP, max_size=25))
def test_any_sequence_accounts_and_leaks_nothing(base: Machine, stub: Stub, steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        machine = hip_machine(base, stub, Path(folder), total_bytes=64 * MIB, pid=os.getpid())
        live: list = []
        for verb, which, nbytes in steps:
            try:
                if verb in ("take", "movable"):
                    live.append(place(machine, nbytes, _POLICIES[which], movable=verb == "movable"))
                elif verb == "spill":
                    live.append(place(machine, nbytes, Policy.local(spill="peer")))
                elif live and verb == "free":
                    live.pop(which % len(live)).free()
                elif live:
                    live[which % len(live)].move(_POLICIES[which])
            except PlacementError:
                pass  # full, or plain memory asked to move: nothing may have changed
            objects = [0, 0]
            for buffer in live:
                for piece in buffer._allocation.token.pieces:
                    objects[piece.device] += -(-piece.nbytes // (2 * MIB)) * 2 * MIB
            assert objects == [stub.used(0), stub.used(1)]
            for buffer in live:
                assert sum(buffer.locate().bytes_by_domain.values()) == buffer.nbytes
        for buffer in live:
            buffer.free()
        assert stub.empty()


def test_no_probe_on_this_backend_is_told(dpx: Machine) -> None:
    with pytest.raises(Unsupported, match=r"no latency probe here: torch .* is built"):
        audit(place(dpx, MIB, Policy.local()), probe=True)


def test_a_host_without_hip_is_told(base: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dieplace.backends.amd.backend.topology.snapshot", lambda *_, **__: base)
    with pytest.raises(Unsupported, match="the HIP runtime cannot be used"):
        AmdBackend(hip_library="/nowhere/libamdhip64.so").memory  # noqa: B018


def test_the_backend_opens_its_memory_once_for_each_mode(
    base: Machine, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dieplace.backends.amd.backend.topology.snapshot", lambda *_, **__: base)
    stamps = [("boot", "1")]
    monkeypatch.setattr("dieplace.backends.amd.backend.topology.stamp", lambda *_: stamps[-1])
    stub.reset([(d.bdf, 1, 2) for d in base.devices], TOTAL, None)
    backend = AmdBackend(hip_library=str(stub.path))
    first = backend.memory
    assert backend.memory is first and "memory" in backend.groups
    stamps.append(("boot", "2"))
    assert backend.memory is not first
