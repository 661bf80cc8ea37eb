"""Compiling FlyDSL launchers: what comes out, what is refused, what survives an abort, when a cache is used."""

import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import handoff_kernels as handoff
import pytest
import torch
import trial_kernels as trial

from dieplace.codegen import flydsl
from dieplace.codegen.flydsl import CompileOptions, bind, compile_launcher
from dieplace.codegen.flydsl_names import flyc, fx, inline_asm, range_constexpr
from dieplace.codegen.linker import find_linker
from dieplace.codegen.worker import Worker
from dieplace.errors import CompileError, UsageError

STREAM = fx.Stream(None)


@pytest.fixture
def options(tmp_path: Path) -> CompileOptions:
    return CompileOptions(cache_dir=tmp_path / "cache")


def three(n: int = 1000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    return torch.randn(n), torch.randn(n), torch.zeros(n), n


def test_isa_is_for_gfx950_and_resources_are_those_of_the_assembly(options: CompileOptions) -> None:
    compiled = compile_launcher(trial.gemv_bf16(8, 512), *gemv_args(8, 512), options=options)
    assert '.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"' in compiled.isa
    assert "define amdgpu_kernel void" in compiled.llvm_ir
    (kernel,) = compiled.kernels

    def directive(name: str) -> int:  # LLVM's own kernel descriptor, a second source beside the metadata note
        found = re.search(rf"\.amdhsa_{name} (\d+)", compiled.isa)
        assert found
        return int(found.group(1))

    assert kernel.lds_bytes == directive("group_segment_fixed_size")
    assert kernel.scratch_bytes == directive("private_segment_fixed_size") == 0
    assert kernel.kernarg_bytes == directive("kernarg_size")
    assert kernel.vgpr == directive("next_free_vgpr") > 8
    assert kernel.required_workgroup == (256, 1, 1)
    # three tensors of one or two run-time sizes: pointers are where the metadata says
    assert [a.size for a in kernel.args if a.kind == "global_buffer"] == [8, 8, 8]


def gemv_args(n: int, k: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, k) / 8).bfloat16(), torch.randn(k).bfloat16(), torch.zeros(n)


@pytest.mark.slow
def test_target_is_explicit_whatever_the_environment_says() -> None:
    script = (
        "import torch, trial_kernels as t; from dieplace.codegen.flydsl import *\n"
        "c = compile_launcher(t.vector_add(), torch.zeros(4), torch.zeros(4), torch.zeros(4), 4,"
        " options=CompileOptions(cache=False))\n"
        "print('gfx950' in c.isa, 'gfx942' in c.isa)\n"
        "try: activate(CompileOptions(arch='gfx942'))\n"
        "except CompileError as e: print(e.message)\n"
    )
    support = str(Path(trial.__file__).parent)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": support, "FLYDSL_GPU_ARCH": "gfx942", "ARCH": "gfx90a"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.splitlines()[0] == "True False", done.stderr
    assert "already compiles for gfx950" in done.stdout


def copy_kernel(bits: int, count: int) -> Any:
    @flyc.kernel
    def copy(X: fx.Tensor, Y: fx.Tensor):
        atom = fx.make_copy_atom({128: fx.rocdl.BufferCopy128b, 64: fx.rocdl.BufferCopy64b}[bits](), fx.Float32)
        xs = fx.logical_divide(fx.rocdl.make_buffer_tensor(X), fx.make_layout(count, 1))
        r = fx.make_rmem_tensor(count, fx.Float32)
        fx.copy_atom_call(atom, fx.slice(xs, (None, fx.thread_idx.x)), r)
        Y[fx.thread_idx.x] = r.load()[0]

    @flyc.jit
    def launch(X: fx.Tensor, Y: fx.Tensor, stream: fx.Stream = STREAM):
        copy(X, Y).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def test_an_abort_of_the_compiler_is_an_error_here_and_the_next_compile_works(options: CompileOptions) -> None:
    x, y = torch.zeros(256), torch.zeros(64)
    compile_launcher(copy_kernel(128, 4), x, y, options=options)
    starts = flydsl._process.worker.starts
    with pytest.raises(CompileError) as caught:
        compile_launcher(copy_kernel(128, 2), x, y, options=options)
    assert caught.value.facts["signal"] == "SIGABRT"
    assert "Assertion" in caught.value.message
    compiled = compile_launcher(copy_kernel(64, 2), x, y, options=options)
    assert "buffer_load_dwordx2" in compiled.isa
    assert flydsl._process.worker.starts == starts + 1


def faulty(kind: str) -> Any:
    @fx.struct
    class Large:
        data: fx.Array[fx.Float32, 41216, 16]  # 164864 bytes

    threads = 2048 if kind == "threads" else 256

    @flyc.kernel
    def bad(X: fx.Tensor, Y: fx.Tensor, n: fx.Int32):
        tid = fx.thread_idx.x
        if kind == "lds":
            data = fx.SharedAllocator().allocate(Large).peek().data.view(fx.make_layout(41216, 1))
            data[tid] = X[tid]
            fx.gpu.barrier()
            Y[tid] = data[tid + n]
        elif kind == "tanh":
            Y[tid] = fx.tanh(X[tid])
        elif kind == "spills":
            kept = [X[tid + i * 64] for i in range_constexpr(700)]
            fx.gpu.barrier()
            for i in range_constexpr(700):
                Y[tid + i * 64] = kept[i] * kept[(i * 7 + 3) % 700] + kept[(i * 11 + 5) % 700]
        elif kind == "nothing":
            X[tid] + 1.0
        else:
            Y[tid] = X[tid]

    @flyc.jit
    def launch(X: fx.Tensor, Y: fx.Tensor, n: fx.Int32, stream: fx.Stream = STREAM):
        bad(X, Y, n).launch(grid=(1, 1, 1), block=(threads, 1, 1), stream=stream)

    return launch


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lds", "exceeds limit (163840)"),
        ("lds", "164864 bytes of LDS, the limit is 163840"),
        ("tanh", "no libcall available for ftanh"),
        ("tanh", "the body is empty"),
        ("threads", "a workgroup of 2048 threads, the limit is 1024"),
        ("spills", "VGPR and"),
        ("spills", "bytes of scratch a lane"),
        ("nothing", "the body is empty"),
    ],
)
def test_what_flydsl_accepts_and_the_card_does_not_is_refused(kind: str, said: str, options: CompileOptions) -> None:
    hints = {"waves_per_eu": (4, 4)} if kind == "spills" else {}
    x, y = torch.zeros(65536), torch.zeros(65536)
    with pytest.raises(CompileError, match=re.escape(said)):
        compile_launcher(faulty(kind), x, y, 0, options=CompileOptions(hints=hints, cache_dir=options.cache_dir))


def test_a_mistake_in_tracing_is_a_compile_error_with_flydsls_words(options: CompileOptions) -> None:
    @flyc.kernel
    def bad(Y: fx.Tensor):
        x = fx.Int32(0)
        if fx.thread_idx.x == 0:
            x = fx.Float32(1.0)
        Y[0] = x

    @flyc.jit
    def launch(Y: fx.Tensor, stream: fx.Stream = STREAM):
        bad(Y).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    with pytest.raises(CompileError, match="carried variable 'x' does not match"):
        compile_launcher(launch, torch.zeros(1), options=options)
    with pytest.raises(UsageError, match=r"expected a @flyc\.jit launcher, got function"):
        compile_launcher(gemv_args, options=options)


@pytest.mark.parametrize(
    ("text", "constraints", "said"),
    [
        ("global_load_dword $0, $1, off", "=&v,v", "put its s_waitcnt into the same block"),
        ("global_load_dword $0, $1, off\n s_waitcnt vmcnt(0)", "=v,v", "early clobber"),
    ],
)
def test_f15_an_inline_load_without_its_wait_is_refused(
    text: str, constraints: str, said: str, options: CompileOptions
) -> None:
    @flyc.kernel
    def load(X: fx.Tensor, Y: fx.Tensor):
        word = inline_asm(fx.Int32.ir_type, [fx.get_iter(X).llvm_ptr], text, constraints)
        Y[0] = fx.Int32(word)

    @flyc.jit
    def launch(X: fx.Tensor, Y: fx.Tensor, stream: fx.Stream = STREAM):
        load(X, Y).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    ints = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(CompileError, match=said):
        compile_launcher(launch, ints, ints, options=options)


# -- case f4: a changed helper, closure constant or switch never runs old code -----------------------------------------


def helper(x: Any) -> Any:
    return x + 1.0


SWITCH = {"twice": False}


def uses_helper(constant: float) -> Any:
    @flyc.kernel
    def apply(X: fx.Tensor, Y: fx.Tensor):
        value = helper(X[fx.thread_idx.x]) * constant
        if SWITCH["twice"]:
            value = value + value
        Y[fx.thread_idx.x] = value

    @flyc.jit
    def launch(X: fx.Tensor, Y: fx.Tensor, stream: fx.Stream = STREAM):
        apply(X, Y).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


@pytest.mark.parametrize("cache", [True, False])
def test_f4_a_changed_helper_gives_new_code(cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = CompileOptions(cache=cache, cache_dir=tmp_path)
    x, y = torch.zeros(64), torch.zeros(64)
    launcher = uses_helper(3.0)
    first = compile_launcher(launcher, x, y, options=options)
    assert compile_launcher(launcher, x, y, options=options).code_hash == first.code_hash
    monkeypatch.setitem(globals(), "helper", lambda value: value + 2.0)
    second = compile_launcher(launcher, x, y, options=options)
    monkeypatch.setitem(SWITCH, "twice", True)
    third = compile_launcher(launcher, x, y, options=options)
    fourth = compile_launcher(uses_helper(5.0), x, y, options=options)
    hashes = {c.code_hash for c in (first, second, third, fourth)}
    assert len(hashes) == 4
    assert "1.0" in first.isa and "2.0" in second.isa.replace("1.0", "")


def test_hints_are_part_of_the_key_and_do_not_stay_with_the_launcher(options: CompileOptions) -> None:
    launcher, args = trial.chase(), (torch.zeros(64, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), 5)
    plain = compile_launcher(launcher, *args, options=options)
    hinted = CompileOptions(hints={"llvm_options": {"unroll-runtime": False}}, cache_dir=options.cache_dir)
    rolled = compile_launcher(launcher, *args, options=hinted)
    assert plain.isa.count("global_load_dword ") > rolled.isa.count("global_load_dword ") == 1
    assert compile_launcher(launcher, *args, options=options).code_hash == plain.code_hash


def test_the_disk_cache_hits_across_processes_and_a_torn_entry_is_a_miss(options: CompileOptions) -> None:
    flydsl._process.by_key.clear()  # what earlier tests compiled in this process
    first = compile_launcher(trial.vector_add(), *three(), options=options)
    flydsl._process.by_key.clear()
    again = compile_launcher(trial.vector_add(), *three(), options=options)
    assert again.from_cache and not first.from_cache
    assert (again.isa, again.kernels, again.code_hash) == (first.isa, first.kernels, first.code_hash)
    (entry,) = [p for p in options.cache_dir.iterdir() if first.key in p.name]  # type: ignore[union-attr]
    whole = entry.read_bytes()
    for torn in (whole[: len(whole) // 2], whole.replace(b'"format": ', b'"format": 9'), b"", b"[]"):
        entry.write_bytes(torn)
        flydsl._process.by_key.clear()
        assert not compile_launcher(trial.vector_add(), *three(), options=options).from_cache


# -- handles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: (a[0].double(), *a[1:]), "A was compiled as"),
        (lambda a: (a[0], a[1][:-1], *a[2:]), "B was compiled as"),
        (lambda a: (a[0], a[1], torch.zeros(2000)[::2], a[3]), "C was compiled as"),
    ],
)
def test_a_bound_kernel_refuses_other_tensors(change: Any, said: str, options: CompileOptions) -> None:
    args = three()
    handle = bind(trial.vector_add(), *args, options=options)
    with pytest.raises(UsageError, match=said):
        handle(*change(args))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("drop_first", [True, False])
def test_f5_without_a_cache_each_op_twice_and_no_crash(keep: bool, drop_first: bool) -> None:
    options = CompileOptions(cache=False)
    handles = []
    for make, args in (
        (trial.vector_add, three()),
        (lambda: trial.gemv_bf16(8, 512), gemv_args(8, 512)),
    ):
        launcher = make()
        for _ in range(2):
            handle = bind(launcher, *args, options=options)
            result = args[2]
            result.fill_(torch.nan)
            handle(*args)
            assert not result.isnan().any()
            handles.append(handle)
            if not keep:
                handles.clear()
                gc.collect()
    while handles:
        handles.pop(0 if drop_first else -1)
        gc.collect()
    a, b, c, n = three()
    bind(trial.vector_add(), a, b, c, n, options=options)(a, b, c, n)
    assert torch.equal(c, a + b)


# -- linking -----------------------------------------------------------------------------------------------------------

LINKER, WHY = find_linker()

HALF, WORDS = torch.zeros(16, 512).bfloat16(), torch.zeros(64, dtype=torch.int64)
INTS, FLAT, BYTES = torch.zeros(16, 64, dtype=torch.int32), torch.zeros(4096), torch.zeros(16, 16, dtype=torch.uint8)
KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "vector add": (trial.vector_add, three()),
    "gemv, buffer, nt": (lambda: trial.gemv_bf16(8, 512, cache=2), gemv_args(8, 512)),
    "gemv, global": (lambda: trial.gemv_bf16(8, 512, buffered=False), gemv_args(8, 512)),
    "gemv, rolled": (lambda: trial.gemv_bf16(8, 1024, rolled=True), gemv_args(8, 1024)),
    "gemv, mxfp4": (lambda: trial.gemv_mxfp4(16, 512), (INTS, BYTES, HALF[0], FLAT)),
    "gemv, matrix bf16": (lambda: trial.gemv_mfma_bf16(16, 512), (HALF, HALF[0], FLAT)),
    "gemv, matrix mxfp4": (lambda: trial.gemv_mfma_mxfp4(16, 512), (INTS, BYTES, INTS[0], BYTES[0], FLAT)),
    "rmsnorm": (lambda: trial.rmsnorm(2048), (*[torch.zeros(1, 2048).bfloat16()] * 3, 1)),
    "attention split": (
        trial.attention_split,
        (FLAT.view(64, 64), *[torch.zeros(4, 4, 64)] * 3, *[torch.zeros(4, 4)] * 2, 4, 4, 1.0, 4, 1),
    ),
    "attention merge": (
        trial.attention_merge,
        (torch.zeros(4, 4, 64), *[torch.zeros(4, 4)] * 2, FLAT.view(64, 64), 4, 4),
    ),
    "top k": (trial.top_k, (torch.zeros(1, 128), torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 4), 1)),
    "chase": (trial.chase, (INTS[0], WORDS, 5)),
    "stream": (trial.stream_read, (INTS.view(-1), INTS.view(-1), 1, 1)),
    "hand-off": (lambda: handoff.both("system", "system"), (WORDS, INTS, INTS[0], 4, 8)),
    "persistent": (lambda: handoff.persistent(4), (FLAT, torch.zeros(3, 4), INTS[0], torch.zeros(3, 4))),
}


@pytest.mark.skipif(LINKER is None, reason=WHY)
@pytest.mark.parametrize("name", KERNELS)
def test_links_to_a_code_object_for_gfx950(name: str, options: CompileOptions) -> None:
    make, args = KERNELS[name]
    compiled = compile_launcher(make(), *args, options=CompileOptions(link=True, cache_dir=options.cache_dir))
    assert compiled.hsaco is not None and compiled.hsaco_why is None
    # ELF header (System V ABI): magic, EM_AMDGPU = 224; e_flags low byte 0x4f = EF_AMDGPU_MACH_AMDGCN_GFX950 (LLVM)
    assert compiled.hsaco[:4] == b"\x7fELF"
    assert int.from_bytes(compiled.hsaco[18:20], "little") == 224
    assert compiled.hsaco[48] == 0x4F
    # on a device FlyDSL's host code gets the code object in place of the assembly
    assert compiled.device_module is not None and "\\7FELF" in compiled.device_module
    assert "\\7FELF" not in compiled.host_module and "s_endpgm" in compiled.host_module


def test_device_tensors_are_refused_in_a_process_that_emulates(options: CompileOptions) -> None:
    class OnDevice:
        is_cuda = True

    bind(trial.vector_add(), *three(), options=options)
    with pytest.raises(UsageError, match="emulates the device, and was given device tensors"):
        bind(trial.vector_add(), OnDevice(), OnDevice(), OnDevice(), 4, options=options)


def test_a_compile_that_takes_too_long_is_stopped_and_the_worker_comes_back() -> None:
    from dieplace.codegen.flydsl_host import Lowering

    nothing = Lowering("module {}", "nothing", ("canonicalize",), (), "gfx950", "")
    worker = Worker(timeout_s=0.05)
    with pytest.raises(CompileError, match="took more than"):
        worker.lower(nothing)  # starting takes longer
    worker.timeout_s = 60
    with pytest.raises(CompileError, match="gave no device code"):
        worker.lower(nothing)
    assert worker.starts == 2
    worker.close()


def test_without_a_linker_the_reason_is_given(options: CompileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flydsl, "find_linker", lambda: (None, "needs ld.lld 19 or newer"))
    compiled = compile_launcher(
        trial.vector_add(), *three(), options=CompileOptions(link=True, cache=False, cache_dir=options.cache_dir)
    )
    assert compiled.hsaco is None and compiled.hsaco_why == "needs ld.lld 19 or newer"
