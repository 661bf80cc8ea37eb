"""Placement on real NVIDIA GPUs: one is enough for most of it, two for the peer.

Run by hand: python -m pytest tests/device/test_placement_device.py -s -rs
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dieplace.backends import vmm
from dieplace.discover import probes
from dieplace.errors import DomainFull, Misplaced, PlacementError, Unsupported
from dieplace.machine import Device, Machine
from dieplace.memory import place
from dieplace.policy import Policy
from dieplace.residency import audit

pytestmark = pytest.mark.device
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="module")
def machine() -> Machine:
    answer = probes()["nvidia"]
    if not answer.available:
        pytest.skip(f"no NVIDIA GPU to place memory on: {answer.reason}")
    import dieplace

    return dieplace.discover("nvidia")


@pytest.fixture
def die(machine: Machine) -> Iterator[Device]:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    yield next(d for d in machine.devices if d.runtime_index == 0)


@pytest.fixture
def pair(machine: Machine, die: Device) -> tuple[Device, Device]:
    others = [d for d in machine.devices if d.runtime_index not in (None, 0)]
    if len(machine.devices) != 2 or not others:
        pytest.skip("two GPUs are needed for a peer")
    return die, others[0]


FIGURES: list[dict[str, object]] = []


def tell(**figures: object) -> None:
    """Print figures, and keep them for the file that `--figures` names (see conftest.py)."""
    print("FIGURE", {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()})
    FIGURES.append({"test": os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0], **figures})


@pytest.fixture(scope="module", autouse=True)
def figures_file(machine: Machine, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    target = request.config.getoption("--figures", default=None)
    if target is None:
        return
    import torch

    found = {
        "schema": "dieplace/placement-figures/1",
        "origin": "measured",
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "failed": request.session.testsfailed,
        "figures": FIGURES,
    }
    with open(target, "w") as file:
        json.dump(found, file, indent=1, allow_nan=False, default=str)
        file.write("\n")


def best_seconds(act: Callable[[], object], times: int = 5) -> float:
    import torch

    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


def reserved(index: int = 0) -> int:
    import torch

    return int(torch.cuda.memory_reserved(index))


# -- local -------------------------------------------------------------------------------------------------------------


def test_factories_modules_and_safetensors_land_in_the_domain(die: Device) -> None:
    import torch

    with die.local(role="weights"):
        made = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda"), torch.arange(5, device="cuda:0")]
        model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.LayerNorm(4096)).to("cuda")
    found = audit(made, model).require_placed("accounted")
    assert set(found.bytes_by_domain()) == {die.domain} and set(found.bytes_by_role()) == {"weights"}
    assert model(torch.ones(1, 4096, device="cuda")).shape == (1, 4096)


def test_any_thread_with_any_current_device_and_nested(machine: Machine, die: Device) -> None:
    """pytorch issue 149802."""
    import torch

    current = torch.cuda.device_count() - 1
    made: list[torch.Tensor] = []

    def work() -> None:
        torch.cuda.set_device(current)
        with die.local(role="weights"), die.local(role="kv_cache"):
            made.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0"))
        assert torch.cuda.current_device() == current

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.set_device(0)
    assert audit(made).require_placed().bytes_by_role() == {"kv_cache": 2 * MIB}


def test_other_threads_and_gradients_are_told_as_not_placed(die: Device) -> None:
    """pytorch issues 152861 and 167353."""
    import torch

    other: list[torch.Tensor] = []
    with die.local(role="weights"):
        mine = torch.zeros(16 << 20, device="cuda", requires_grad=True)
        thread = threading.Thread(target=lambda: other.append(torch.zeros(16 << 20, device="cuda")))
        thread.start()
        thread.join()
        (mine * 2).sum().backward()
    found = audit({"mine": mine, "other": other[0], "gradient": mine.grad})
    by_name = {item.name: item.misplaced_bytes for item in found.items}
    assert by_name["mine"] == 0 and by_name["other"] == 64 * MIB
    tell(gradient_not_placed_bytes=by_name["gradient"])
    assert found.bytes_by_domain() == {die.domain: 192 * MIB}
    with pytest.raises(Misplaced, match="other"):
        found.require_placed()


def test_ten_thousand_allocations_cost_what_torch_costs(die: Device) -> None:
    import torch

    def many() -> None:
        for _ in range(10_000):
            torch.empty(4096, dtype=torch.uint8, device="cuda")

    many()
    ratios, entering = [], []
    for _ in range(7):
        plain = best_seconds(many, 1)
        start = time.perf_counter()
        with die.local(role="activation"):
            entered = time.perf_counter()
            many()
            inside = time.perf_counter() - entered
        entering.append(time.perf_counter() - start - inside)
        ratios.append(inside / plain)
    ratio = sorted(ratios)[len(ratios) // 2]
    tell(local_over_plain=ratio, entering_and_leaving_us=min(entering) * 1e6)
    assert ratio <= 1.1


def test_a_module_is_placed_as_fast_as_it_is_moved(machine: Machine, die: Device) -> None:
    import torch

    def build() -> torch.nn.Module:
        kind, options = torch.nn.Linear, {"bias": False, "dtype": torch.bfloat16}
        layers = [torch.nn.utils.skip_init(kind, 16384, 16384, **options) for _ in range(8)]
        for layer in layers:
            layer.weight.data.fill_(1)
        return torch.nn.Sequential(*layers)

    times: dict[str, float] = {"to": 1e9, "place": 1e9}
    model = build()
    for _ in range(3):
        copy = torch.nn.Sequential(*model)
        weights = [layer.weight.data for layer in model]
        times["to"] = min(times["to"], best_seconds(lambda m=copy: m.to("cuda"), 1))  # type: ignore[misc]
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.data = weight
        gc.collect()
        torch.cuda.empty_cache()
        act = lambda: place(model, device=die, policy=Policy.local())  # noqa: E731
        times["place"] = min(times["place"], best_seconds(act, 1))
        audit(model).require_placed("accounted")
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.data = weight
        machine.session.memory._pools.trim()  # type: ignore[union-attr]
        torch.cuda.empty_cache()
    tell(to_gb_per_s=4 * GIB / times["to"] / 1e9, place_gb_per_s=4 * GIB / times["place"] / 1e9)
    assert times["to"] / times["place"] >= 0.9


# -- buffers and swaps -------------------------------------------------------------------------------------------------


def test_buffers_are_accounted_and_go_back(machine: Machine, die: Device) -> None:
    session = machine.session.memory  # type: ignore[union-attr]
    free, total = session.runtime.memory_info(0)
    buffer = machine.allocate((1 << 20, 256), device=die, policy=Policy.local(), role="weights", dtype="bfloat16")
    tensor = buffer.tensor
    tensor.fill_(3)
    assert tensor.device.index == 0 and float(tensor.float().sum()) == 3.0 * tensor.numel()
    audit(buffer, tensor).require_placed("accounted")
    with pytest.raises(DomainFull) as caught:
        machine.allocate(total + 1, device=die, policy=Policy.local(), role="weights")
    assert caught.value.facts["domain"] == die.domain and caught.value.facts["asked_bytes"] == total + 1
    buffer.free()
    del tensor
    assert session.runtime.memory_info(0)[0] == free


def test_a_swap_keeps_pointer_and_contents(machine: Machine, die: Device) -> None:
    import torch

    nbytes = 256 * MIB
    buffer = machine.allocate(nbytes, device=die, policy=Policy.local(), role="weights", movable=True)
    tensor = buffer.tensor
    tensor.copy_(torch.arange(nbytes, device="cuda", dtype=torch.int32).to(torch.uint8))
    want, address = tensor.clone(), tensor.data_ptr()
    handles = [part.handle for part in buffer._allocation.token.range.parts]
    seconds = best_seconds(lambda: buffer.move(Policy.local()), 3)
    assert [part.handle for part in buffer._allocation.token.range.parts] != handles, "other physical objects"
    assert tensor.data_ptr() == address and torch.equal(tensor, want)
    audit(buffer).require_placed("accounted")
    tell(swap_256_mib_ms=seconds * 1e3)


def test_the_reported_sizes_in_one_range(machine: Machine, die: Device) -> None:
    runtime = machine.session.memory.runtime  # type: ignore[union-attr]
    made = vmm.build(runtime, [(2_379_776, 0), (7_864_320, 0), (6_533_120, 0)], (0,))
    assert [part.nbytes for part in made.parts] == [4_194_304, 8_388_608, 8_388_608]
    vmm.close(made)
    tell(granularity=runtime.granularity(0))


def test_a_pool_over_ranges_keeps_the_executing_index_and_outlives_its_context(machine: Machine, die: Device) -> None:
    """The peer's way of placing, with the own domain as its home; pytorch PR 171962: a tensor outlives its pool."""
    import torch

    session = machine.session.memory  # type: ignore[union-attr]
    own = machine.domain(str(die.domain))
    free = session.runtime.memory_info(0)[0]
    with session.placing([own, own], device=die, role="weights"):
        tensor = torch.full((64 * MIB,), 2, dtype=torch.uint8, device="cuda")
    held = session.find(tensor.data_ptr())
    assert held is not None and held.token.kind == "range" and tensor.device.index == 0
    audit(tensor).require_placed("accounted")
    session._pools.trim()
    gc.collect()
    assert int(tensor.sum(dtype=torch.int64)) == 2 * 64 * MIB
    assert len(session.lifetimes.live()) >= 1
    del held, tensor
    session._pools.trim()
    gc.collect()
    torch.cuda.empty_cache()
    assert all(one.role != "weights" or one.kind != "range" for one in session.lifetimes.live())
    assert session.runtime.memory_info(0)[0] >= free - 2 * MIB


def test_a_full_pool_is_domain_full(machine: Machine, die: Device) -> None:
    import torch

    session = machine.session.memory  # type: ignore[union-attr]
    own, total = machine.domain(str(die.domain)), session.runtime.memory_info(0)[1]
    for pattern in ([own], [own, own]):
        with pytest.raises(DomainFull) as caught, session.placing(pattern, device=die, role="weights"):
            torch.empty(total + GIB, dtype=torch.uint8, device="cuda")
        assert caught.value.facts["domain"] == die.domain and caught.value.facts["total_bytes"] == total


def test_flags_and_cache(machine: Machine, die: Device) -> None:
    import torch

    flags = die.sync_flags(64)
    flags.put(3, 1.5, flags.next_tag())
    assert flags.read(3) == (1.5, 1) and flags.words.stride() == (16,) and flags.words.device.index == 0
    cache = die.kv_cache(layers=2, kv_heads=8, head_dim=64, tokens=256)
    rows = torch.ones(4, 8, 64, dtype=torch.bfloat16, device="cuda")
    cache.write(1, cache.reserve(4).to("cuda"), rows, 2 * rows)
    assert float(cache.values(1)[0, 3].float().sum()) == 2 * 8 * 64
    audit(flags, cache).require_placed("accounted")


# -- captures ----------------------------------------------------------------------------------------------------------


def test_in_a_capture_frees_wait_and_allocations_are_refused(machine: Machine, die: Device) -> None:
    import torch

    buffer = machine.allocate(4 * MIB, device=die, policy=Policy.local(), role="activation")
    live = len(machine.session.memory.lifetimes.live())  # type: ignore[union-attr]
    x = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        buffer.free()
        with pytest.raises(PlacementError, match="captured"):
            machine.allocate(MIB, device=die, policy=Policy.local(), role="activation")
        with pytest.raises(PlacementError, match="captured"), die.local(role="activation"):
            pass
    graph.replay()
    torch.cuda.synchronize()
    assert float(x[0]) == 1.0
    machine.allocate(MIB, device=die, policy=Policy.local(), role="activation").free()
    assert len(machine.session.memory.lifetimes.live()) == live - 1  # type: ignore[union-attr]


def test_memory_placed_inside_a_capture_outlives_its_graph(die: Device) -> None:
    """rocm-systems PR 7092."""
    import torch

    with die.local(role="activation"):
        torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")  # the pool grows outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = torch.full((8 * MIB,), 5, dtype=torch.uint8, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    assert int(inside.sum(dtype=torch.int64)) == 5 * 8 * MIB


def test_an_error_in_a_capture_leaves_nothing_reserved(machine: Machine, die: Device) -> None:
    """pytorch PR 190308."""
    import torch

    def left() -> int:
        machine.session.memory._pools.trim()  # type: ignore[union-attr]
        gc.collect()
        torch.cuda.empty_cache()
        return reserved()

    before = left()
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ZeroDivisionError), die.local(role="activation"), torch.cuda.graph(graph):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            raise ZeroDivisionError
        del graph
        assert left() == before
    with die.local(role="activation"):
        kept = torch.ones(1024, device="cuda")
    assert float(kept.sum()) == 1024.0


# -- between processes -------------------------------------------------------------------------------------------------

_IMPORTER = """
import pickle, sys
import dieplace
exported = pickle.loads(sys.stdin.buffer.read())
machine = dieplace.discover("nvidia")
device = next(d for d in machine.devices if d.runtime_index == 0)
one, two = (dieplace.import_buffer(machine, exported, device=device) for _ in range(2))
one.free()
tensor = two.tensor
total = int(tensor.sum())
tensor.fill_(2)
import torch
torch.cuda.synchronize()
print(total)
"""


@pytest.mark.parametrize("nbytes", [1, 65, 2_097_152, 2_267_136, 16_764_871])
def test_an_exported_buffer_of_any_size(machine: Machine, die: Device, nbytes: int) -> None:
    buffer = machine.allocate(nbytes, device=die, policy=Policy.local(), role="weights")
    buffer.tensor.fill_(1)
    exported = pickle.dumps(buffer.export())
    if nbytes == 2_267_136:  # one process is enough to see that the memory is the same
        done = subprocess.run([sys.executable, "-c", _IMPORTER], input=exported, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        assert int(done.stdout) == nbytes and int(buffer.tensor.sum()) == 2 * nbytes
    with pytest.raises(Unsupported):
        machine.allocate(nbytes, device=die, policy=Policy.local(), role="weights", movable=True).export()


def test_exit_with_live_placed_tensors_is_quiet(die: Device) -> None:
    program = (
        "import builtins, torch, dieplace as dp\n"
        "machine = dp.discover('nvidia')\n"
        "die = next(d for d in machine.devices if d.runtime_index == 0)\n"
        "own = machine.domain(die.domain)\n"
        "with die.local(role='weights'): a = torch.ones(1 << 20, device='cuda')\n"
        "with machine.session.memory.placing([own, own], device=die, role='kv_cache'):\n"
        "    b = torch.ones(1 << 20, device='cuda')\n"
        "c = machine.allocate(1 << 20, device=die, policy=dp.Policy.local(), role='weights', movable=True)\n"
        "builtins.kept = (a, b, c, c.tensor)\nprint('end')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# -- two GPUs ----------------------------------------------------------------------------------------------------------


def read_gb_per_s(tensor: object) -> float:
    import torch

    view = tensor.view(torch.int64)  # type: ignore[attr-defined]
    seconds = best_seconds(lambda: view.max(), 5)
    return float(view.numel() * 8 / seconds / 1e9)


def test_peer_keeps_the_index_and_puts_every_byte_on_the_other(machine: Machine, pair: tuple[Device, Device]) -> None:
    import torch

    die, other = pair
    session = machine.session.memory  # type: ignore[union-attr]
    with die.peer(role="weights"):
        far = torch.ones(GIB, dtype=torch.uint8, device="cuda:0")
    with die.local(role="weights"):
        near = torch.ones(GIB, dtype=torch.uint8, device="cuda:0")
    assert far.device.index == near.device.index == 0
    assert session.runtime.pointer(far.data_ptr()).device == other.runtime_index
    assert audit(far).require_placed("accounted").bytes_by_domain() == {other.domain: GIB}
    near_speed, far_speed = read_gb_per_s(near), read_gb_per_s(far)
    tell(local_gb_per_s=near_speed, peer_gb_per_s=far_speed)
    assert far_speed < near_speed / 2


def test_one_pointer_two_homes(machine: Machine, pair: tuple[Device, Device]) -> None:
    die, other = pair
    buffer = machine.allocate(GIB, device=die, policy=Policy.local(), role="weights", movable=True)
    tensor = buffer.tensor.fill_(3)
    address, speeds = tensor.data_ptr(), {}
    for policy, home in ((Policy.local(), die), (Policy.peer(), other), (Policy.local(), die)):
        buffer.move(policy)
        assert tensor.data_ptr() == address and int(tensor[-1]) == 3 and tensor.device.index == 0
        assert audit(buffer).require_placed("accounted").bytes_by_domain() == {home.domain: GIB}
        speeds[str(policy)] = read_gb_per_s(tensor)
    tell(address_is_equal=True, **{f"{name}_gb_per_s": speed for name, speed in speeds.items()})
    assert speeds["peer"] < speeds["local"] / 2


def test_flags_on_the_peer(machine: Machine, pair: tuple[Device, Device]) -> None:
    die, other = pair
    flags = die.sync_flags(8, policy=Policy.peer())
    flags.put(1, 2.0, flags.next_tag())
    assert flags.read(1) == (2.0, 1) and flags.words.device.index == 0
    assert audit(flags).require_placed("accounted").bytes_by_domain() == {other.domain: 8 * 128}


def test_interleaved_objects_over_both(machine: Machine, pair: tuple[Device, Device]) -> None:
    die, other = pair
    buffer = machine.allocate(64 * MIB, device=die, policy=Policy.peer_share(3), role="weights")
    found = audit(buffer).require_placed("accounted").bytes_by_domain()
    assert found == {die.domain: 40 * MIB, other.domain: 24 * MIB}
    with pytest.raises(DomainFull):
        machine.allocate(300 * GIB, device=die, policy=Policy.peer_share(3), role="weights")


def test_every_kind_of_placement_is_probed(machine: Machine, pair: tuple[Device, Device]) -> None:
    import torch

    die, other = pair
    with die.peer(role="weights"):
        far = torch.nn.Linear(8192, 4096, device="cuda:0")
    with die.local(role="weights"):
        near = torch.nn.Linear(8192, 4096, device="cuda:0")
    swap = machine.allocate(256 * MIB, device=die, policy=Policy.local(), role="weights", movable=True)
    shared = machine.allocate(64 * MIB, device=die, policy=Policy.peer_share(3), role="kv_cache")
    flags, far_flags = die.sync_flags(64), die.sync_flags(64, policy=Policy.peer())
    for policy, home in ((Policy.local(), die), (Policy.peer(), other)):
        swap.move(policy)
        found = audit(swap, probe=True).require_placed("probed")
        assert found.bytes_by_domain() == {home.domain: 256 * MIB}
    start = time.perf_counter()
    found = audit({"far": far, "near": near, "flags": flags, "far_flags": far_flags, "kv": shared}, probe=True)
    tell(probed_bytes=sum(found.bytes_by_role().values()), seconds=time.perf_counter() - start)
    for item in found.items:
        tell(name=item.name, evidence=item.evidence, where=dict(item.bytes_by_domain), differs=item.disagreement)
    assert found.require_placed("probed").bytes_by_domain("kv_cache") == {die.domain: 40 * MIB, other.domain: 24 * MIB}


def test_the_probe_sees_what_the_books_do_not(machine: Machine, pair: tuple[Device, Device]) -> None:
    """The fault: the home is changed behind the back of everyone who keeps accounts."""
    die, other = pair
    buffer = machine.allocate(64 * MIB, device=die, policy=Policy.local(), role="weights", movable=True)
    held = buffer.owner()[1].token
    vmm.move(held.range, [(32 * MIB, 0), (32 * MIB, int(other.runtime_index or 0))], on_device=0)
    assert not audit(buffer).misplaced, "the accounts are still content"
    (item,) = audit(buffer, probe=True).items
    assert item.bytes_by_domain == {die.domain: 32 * MIB, other.domain: 32 * MIB}
    assert item.misplaced_bytes == 32 * MIB and item.disagreement
    with pytest.raises(Misplaced, match="disagrees"):
        audit(buffer, probe=True).require_placed()


def test_operands_of_another_device_than_the_current_one(machine: Machine, pair: tuple[Device, Device]) -> None:
    """triton issue 2441: the launch took the current device."""
    import torch

    pytest.importorskip("triton", reason="Triton is not installed")
    from dieplace.kernels import registry

    index = int(pair[1].runtime_index or 0)
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((1, 2880), (512, 2880)))
    out = torch.empty(1, 512, device=f"cuda:{index}")
    operands = {"x": x.to(out.device), "weight": weight.to(out.device), "out": out}
    torch.cuda.set_device(0)
    assert registry.run("gemv_bf16", operands, backend="triton", strict=True) == "triton"
    assert torch.cuda.current_device() == 0
    expected = x.double() @ weight.double().T
    assert float((out.cpu().double() - expected).abs().max() / expected.abs().max()) < 1e-5
    with pytest.raises(Unsupported) as told:
        registry.run("gemv_bf16", {**operands, "weight": weight.to("cuda:0")}, backend="triton", strict=True)
    assert "cuda:0" in str(told.value) and f"cuda:{index}" in str(told.value)
