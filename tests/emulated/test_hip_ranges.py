"""Virtual ranges, moves and sharing over an emulated HIP runtime: the reported faults of VMM and IPC."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hip_machine import hip_machine
from stub_hip import Stub, build

from dieplace.backends import vmm
from dieplace.backends.amd.hip import Hip
from dieplace.backends.emulated import EmulatedBackend
from dieplace.backends.runtime import RuntimeFailed
from dieplace.emulator.node import create
from dieplace.errors import DomainFull, PlacementError, StaleMachine, Unsupported, UsageError
from dieplace.kvcache import KVCache
from dieplace.machine import Machine
from dieplace.policy import Policy
from dieplace.residency import audit
from dieplace.sharing import import_buffer
from dieplace.syncflags import SyncFlags

pytestmark = pytest.mark.real_binding
MIB = 1 << 20
PARTS = (2_379_776, 7_864_320, 6_533_120)  # rocm-systems issue 2516
OBJECTS = (4_194_304, 8_388_608, 8_388_608)
INVALID = 1


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
    return hip_machine(base, stub, tmp_path, total_bytes=1 << 30, pid=os.getpid())


@pytest.fixture
def hip(dpx: Machine, stub: Stub) -> Hip:
    made = Hip(str(stub.path))
    stub.clear()
    return made


def place(machine: Machine, nbytes: int, policy: Policy, role: str = "weights", **options: object):
    return machine.allocate(nbytes, device="gpu0/p0", policy=policy, role=role, **options)  # type: ignore[arg-type]


# -- ranges ------------------------------------------------------------------------------------------------------------


def test_a_range_of_three_is_undone_map_by_map(hip: Hip, stub: Stub) -> None:
    """ROCR-Runtime 285, 257: one unmap for several maps leaves the range unfreeable."""
    made = vmm.build(hip, [(size, 0) for size in PARTS], (0,))
    vmm.close(made)
    maps = [tuple(line.split()[1:3]) for line in stub.log("hipMemMap")]
    unmaps = [tuple(line.split()[1:3]) for line in stub.log("hipMemUnmap")]
    assert len(maps) == 3 and sorted(maps) == sorted(unmaps) and [int(size) for _, size in maps] == list(OBJECTS)
    order = [line.split()[0] for line in stub.log("hipMemUnmap", "hipMemRelease", "hipMemAddressFree")]
    assert order == ["hipMemUnmap"] * 3 + ["hipMemRelease"] * 3 + ["hipMemAddressFree"] and stub.empty()


@pytest.mark.parametrize("granularity", [4096, 2 * MIB])
def test_sizes_are_whole_two_mib_objects_whatever_the_runtime_says(hip: Hip, stub: Stub, granularity: int) -> None:
    stub.set("granularity", granularity)
    made = vmm.build(hip, [(size, 0) for size in PARTS], (0,))
    assert stub.log("hipMemCreate") == [f"hipMemCreate 0 {size}" for size in OBJECTS]
    assert stub.log("hipMemAddressReserve") == [f"hipMemAddressReserve {sum(OBJECTS)} {2 * MIB}"]
    assert made.nbytes == 20_971_520
    vmm.close(made)


def test_a_larger_granularity_wins_and_refuses_patterns(dpx: Machine, stub: Stub) -> None:
    stub.set("granularity", 4 * MIB)
    buffer = place(dpx, MIB, Policy.peer())
    assert stub.log("hipMemCreate") == [f"hipMemCreate 1 {4 * MIB}"]
    with pytest.raises(Unsupported, match="larger than 2 MiB"):
        place(dpx, 8 * MIB, Policy.peer_share(4))
    buffer.free()
    assert stub.empty()


def test_a_refused_sub_range_is_tried_once_from_the_base(hip: Hip, stub: Stub) -> None:
    stub.fail("hipMemSetAccess", 2, INVALID)
    made = vmm.build(hip, [(size, 0) for size in PARTS], (0, 1))
    seen = [(int(line.split()[1], 16) - made.address, int(line.split()[2])) for line in stub.log("hipMemSetAccess")]
    first, second = OBJECTS[0], OBJECTS[0] + OBJECTS[1]
    assert seen == [(0, first), (first, OBJECTS[1]), (0, second), (second, OBJECTS[2])]
    vmm.close(made)
    assert stub.empty()


def test_refused_twice_is_an_error_and_everything_is_undone(hip: Hip, stub: Stub) -> None:
    stub.fail("hipMemSetAccess", 2, INVALID)
    stub.fail("hipMemSetAccess", 3, INVALID)
    with pytest.raises(RuntimeFailed, match="hipErrorInvalidValue") as caught:
        vmm.build(hip, [(size, 0) for size in PARTS], (0,))
    assert caught.value.facts["call"] == "hipMemSetAccess"
    assert len(stub.log("hipMemSetAccess")) == 3, "one retry, not more"
    assert stub.empty() and stub.used(0) == 0


# -- moves -------------------------------------------------------------------------------------------------------------


def test_a_swap_keeps_pointer_contents_and_views(dpx: Machine, stub: Stub) -> None:
    buffer = dpx.allocate(
        (3 * MIB,), device="gpu0/p0", policy=Policy.local(), role="weights", dtype="int32", movable=True
    )
    tensor = buffer.tensor
    tensor.copy_(tensor.new_tensor(range(0, 3 * MIB * 7, 7)))
    want, address = tensor.clone(), tensor.data_ptr()
    for policy, home in ((Policy.peer(), 1), (Policy.local(), 0), (Policy.peer_share(3), None), (Policy.peer(), 1)):
        buffer.move(policy)
        assert tensor.data_ptr() == address == buffer.address and tensor.equal(want)
        audit(buffer, tensor).require_placed("accounted")
        assert stub.used(0) + stub.used(1) == 12 * MIB
        if home is not None:
            assert stub.used(home) == 12 * MIB
    buffer.free()
    del tensor
    assert stub.empty()


def test_plain_memory_and_flags_do_not_move(dpx: Machine, stub: Stub) -> None:
    for buffer in (place(dpx, MIB, Policy.local()), SyncFlags(dpx, "gpu0/p0", 1)):
        stub.clear()
        with pytest.raises(PlacementError, match="movable=True"):
            buffer.move(Policy.peer())
        assert not stub.log("hipMemCreate", "hipMemUnmap")


def test_a_kv_cache_moves_layer_by_layer(dpx: Machine, stub: Stub) -> None:
    cache = KVCache(dpx, "gpu0/p0", layers=3, kv_heads=8, head_dim=64, tokens=512)
    before = [cache.keys(layer).data_ptr() for layer in range(3)]
    cache.move(Policy.peer())
    assert [cache.keys(layer).data_ptr() for layer in range(3)] == before
    assert set(audit(cache).require_placed("accounted").bytes_by_domain()) == {"gpu0/mem1"}


_MOVE = ["hipMemAddressReserve", "hipMemCreate", "hipMemMap", "hipMemSetAccess", "hipMemcpy", "hipMemUnmap"]


@pytest.mark.parametrize("call", _MOVE)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_move_that_fails_leaves_the_old_home_and_contents(dpx: Machine, stub: Stub, call: str, nth: int) -> None:
    buffer = place(dpx, 4 * MIB, Policy.interleave("gpu0/mem0", "gpu0/mem1"))
    tensor = buffer.tensor.fill_(5)
    where, address = buffer.locate().bytes_by_domain, buffer.address
    stub.fail(call, nth, 999)
    try:
        buffer.move(Policy.peer())
        moved = True
    except RuntimeFailed as error:
        moved = False
        assert error.facts["call"] == call
    assert buffer.address == address and bool((tensor == 5).all())
    expected = {"gpu0/mem1": 4 * MIB} if moved else where
    assert buffer.locate().bytes_by_domain == expected
    assert stub.used(0) + stub.used(1) == 4 * MIB and stub.used(1) == expected.get("gpu0/mem1", 0)
    stub.no_faults()
    tensor.fill_(6)
    buffer.free()
    del tensor
    assert stub.empty()


def test_a_move_into_a_full_die_changes_nothing(base: Machine, stub: Stub, tmp_path: Path) -> None:
    machine = hip_machine(base, stub, tmp_path, total_bytes=8 * MIB, pid=os.getpid())
    other = machine.allocate(6 * MIB, device="gpu0/p1", policy=Policy.local(), role="weights")
    buffer = place(machine, 4 * MIB, Policy.local(), movable=True)
    with pytest.raises(DomainFull) as caught:
        buffer.move(Policy.peer())
    assert caught.value.facts["domain"] == "gpu0/mem1" and caught.value.facts["free_bytes"] == 2 * MIB
    assert (stub.used(0), stub.used(1)) == (4 * MIB, 6 * MIB) and buffer.policy == Policy.local()
    other.free()
    buffer.move(Policy.peer())
    assert (stub.used(0), stub.used(1)) == (0, 4 * MIB)


# -- between processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 65, 2_097_152, 2_267_136, 16_764_871])
def test_every_size_can_be_exported(dpx: Machine, stub: Stub, nbytes: int) -> None:
    """hip issue 2257: sizes that are not whole granules failed to export."""
    buffer = place(dpx, nbytes, Policy.local())
    exported = buffer.export()
    assert len(exported.handle) == 64 and exported.nbytes == nbytes
    assert int(stub.log("hipMalloc")[0].split()[2]) % (2 * MIB) == 0


def test_a_range_is_refused_without_a_driver_call(dpx: Machine, stub: Stub) -> None:
    for buffer in (place(dpx, MIB, Policy.peer()), place(dpx, MIB, Policy.local(), movable=True)):
        stub.clear()
        with pytest.raises(Unsupported, match="cannot be exported"):
            buffer.export()
        assert stub.log() == []


def test_an_import_is_closed_once_after_its_last_user(dpx: Machine, stub: Stub) -> None:
    """mscclpp PR 819: the first of two views closed the handle under the other."""
    buffer = place(dpx, MIB, Policy.local())
    buffer.tensor.fill_(3)
    exported = pickle.loads(pickle.dumps(buffer.export()))
    one, two = (import_buffer(dpx, exported, device="gpu0/p0") for _ in range(2))
    assert len(stub.log("hipIpcOpenMemHandle")) == 1
    one.free()
    assert not stub.log("hipIpcCloseMemHandle") and bool((two.tensor == 3).all())
    two.tensor.fill_(4)
    assert bool((buffer.tensor == 4).all())
    last = two.tensor
    two.free()
    assert not stub.log("hipIpcCloseMemHandle"), "a tensor still uses it"
    del last
    assert len(stub.log("hipIpcCloseMemHandle")) == 1
    buffer.free()
    assert stub.empty()


def test_an_import_by_the_other_die_opens_access_and_says_where_it_is(dpx: Machine, stub: Stub) -> None:
    buffer = place(dpx, MIB, Policy.local())
    seen = import_buffer(dpx, buffer.export(), device="gpu0/p1")
    assert stub.log("hipDeviceEnablePeerAccess") == ["hipDeviceEnablePeerAccess 1 0"]
    found = audit(seen)
    assert found.bytes_by_domain() == {"gpu0/mem0": MIB} and found.evidence == "declared", (
        "the exporter accounts for it"
    )
    with pytest.raises(Unsupported, match="exported again"):
        seen.export()


def test_stale_foreign_and_freed_exports_are_refused(dpx: Machine, base: Machine, stub: Stub) -> None:
    buffer = place(dpx, MIB, Policy.local())
    exported = buffer.export()
    for wrong, kind in (
        (replace(exported, stamp=("another boot", "1")), StaleMachine),
        (replace(exported, backend="nvidia"), Unsupported),
        (b"x" * 64, UsageError),
        (replace(exported, handle=b"\0" * 64), RuntimeFailed),
    ):
        with pytest.raises(kind):
            import_buffer(dpx, wrong, device="gpu0/p0")  # type: ignore[arg-type]
    buffer.free()
    with pytest.raises(UsageError, match="freed"):
        buffer.export()
    emulated = base.allocate(MIB, device="gpu0/p0", policy=Policy.local(), role="weights")
    with pytest.raises(Unsupported, match="emulated"):
        emulated.export()
    assert stub.empty()


_IMPORTER = """
import os, pickle, sys
sys.path[:0] = {support!r}
from pathlib import Path
from hip_machine import hip_machine
from stub_hip import Stub
from dieplace.machine import Machine
from dieplace.sharing import import_buffer
base, exported = pickle.loads(sys.stdin.buffer.read())
machine = hip_machine(base, Stub(Path({library!r})), Path({folder!r}), total_bytes=1 << 30, pid=os.getpid())
buffer = import_buffer(machine, exported, device="gpu0/p0")
tensor = buffer.tensor
print(tensor.shape, tensor.dtype, int(tensor.sum()))
tensor.fill_(2)
"""


def test_another_process_reads_and_writes_the_same_memory(
    dpx: Machine, base: Machine, stub: Stub, tmp_path: Path
) -> None:
    buffer = dpx.allocate((1000, 3), device="gpu0/p0", policy=Policy.local(), role="weights", dtype="int32")
    buffer.tensor.fill_(7)
    support = [str(Path(__file__).resolve().parents[1] / "support")]
    program = textwrap.dedent(_IMPORTER).format(support=support, library=str(stub.path), folder=str(tmp_path / "b"))
    given = pickle.dumps((replace(base, session=None), buffer.export()))
    done = subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == "torch.Size([1000, 3]) torch.int32 21000"
    assert bool((buffer.tensor == 2).all())
