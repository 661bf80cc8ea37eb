"""Hand-offs between workgroups for tests: the right ones, and the ways in which they are got wrong.

`how` is how a word is stored or polled: system, agent, workgroup (LLVM scopes), or nt (inline assembly, because LLVM
would move a plain non-temporal load out of a polling loop).
"""

from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.flydsl_names import AtomicOrdering, flyc, fx, range_constexpr

STREAM = fx.Stream(None)
SCOPES = {"system": fn.SYSTEM, "agent": fn.AGENT, "workgroup": fn.WORKGROUP}
FOREVER = 1 << 30


def put(pointer: Any, word: Any, how: str) -> None:
    """Store a 64-bit word."""
    if how == "nt":
        fn.inline_asm(None, [pointer.llvm_ptr, word], "global_store_dwordx2 $0, $1, off nt", "v,v")
    else:
        fx.generic_store(pointer, word, memory_order=AtomicOrdering.Monotonic, syncscope=SCOPES[how])


def poll(pointer: Any, how: str) -> Any:
    """Load a 64-bit word."""
    if how == "nt":
        text = "global_load_dwordx2 $0, $1, off nt\n s_waitcnt vmcnt(0)"
        return fx.Int64(fn.inline_asm(fx.Int64.ir_type, [pointer.llvm_ptr], text, "=&v,v"))
    return fx.generic_load(pointer, memory_order=AtomicOrdering.Monotonic, syncscope=SCOPES[how])


def producer(how: str = "system") -> Any:
    """Block 0 puts (value 3r + 7, tag base + r + 1) in one word for each of `rounds` rounds."""

    @flyc.kernel
    def produce(BOX: fx.Tensor, rounds: fx.Int32, base: fx.Int32):
        if fx.thread_idx.x == 0:
            for r in range(rounds):
                tag, value = fx.Int64(base + fx.Int32(r) + 1), fx.Int64(fx.Int32(r) * 3 + 7)
                put(fx.get_iter(BOX) + fx.Int32(r) * 16, (tag << 32) | value, how)

    @flyc.jit
    def launch(BOX: fx.Tensor, rounds: fx.Int32, base: fx.Int32, stream: fx.Stream = STREAM):
        produce(BOX, rounds, base).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def consumer(how: str = "system") -> Any:
    """Each block polls every round's word and writes its value, or -1 after `limit` polls."""

    @flyc.kernel
    def consume(BOX: fx.Tensor, OUT: fx.Tensor, rounds: fx.Int32, base: fx.Int32, limit: fx.Int32):
        if fx.thread_idx.x == 0:
            for r in range(rounds):
                want, tag, tries = base + fx.Int32(r) + 1, fx.Int32(0), fx.Int32(0)
                word = fx.Int64(0)
                while (tag != want) & (tries < limit):
                    word = poll(fx.get_iter(BOX) + fx.Int32(r) * 16, how)
                    tag = fx.Int32(word >> 32)
                    tries = tries + 1
                    fn.sleep(1)
                OUT[fx.block_idx.x, fx.Int32(r)] = (tag == want).select(fx.Int32(word), fx.Int32(-1))

    @flyc.jit
    def launch(
        BOX: fx.Tensor, OUT: fx.Tensor, rounds: fx.Int32, base: fx.Int32, limit: fx.Int32, blocks: fx.Int32,
        stream: fx.Stream = STREAM,
    ):  # fmt: skip
        consume(BOX, OUT, rounds, base, limit).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def both(how_put: str, how_poll: str) -> Any:
    """Producer (block 0) and consumers (the other blocks) in one launch."""

    @flyc.kernel
    def handoff(BOX: fx.Tensor, OUT: fx.Tensor, XCC: fx.Tensor, rounds: fx.Int32):
        block = fx.block_idx.x
        if fx.thread_idx.x == 0:
            XCC[block] = fn.xcc_id()
            if block == 0:
                for r in range(rounds):
                    tag, value = fx.Int64(fx.Int32(r) + 1), fx.Int64(fx.Int32(r) * 3 + 7)
                    put(fx.get_iter(BOX) + fx.Int32(r) * 16, (tag << 32) | value, how_put)
            else:
                for r in range(rounds):
                    tag, word = fx.Int32(0), fx.Int64(0)
                    while tag != fx.Int32(r) + 1:
                        word = poll(fx.get_iter(BOX) + fx.Int32(r) * 16, how_poll)
                        tag = fx.Int32(word >> 32)
                        fn.sleep(1)
                    OUT[block, fx.Int32(r)] = fx.Int32(word)

    @flyc.jit
    def launch(
        BOX: fx.Tensor, OUT: fx.Tensor, XCC: fx.Tensor, rounds: fx.Int32, blocks: fx.Int32, stream: fx.Stream = STREAM
    ):
        handoff(BOX, OUT, XCC, rounds).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


RELEASES = ("right", "no fence", "no wait")


def publish(release: str) -> Any:
    """Write 64 floats `value`, then a flag word `tag`; `release` is what happens between the two."""

    @flyc.kernel
    def write(DATA: fx.Tensor, FLAG: fx.Tensor, value: fx.Float32, tag: fx.Int32):
        lane = fx.thread_idx.x
        DATA[lane] = value + lane.to(fx.Float32)
        flag = fx.get_iter(FLAG)
        if release == "right":
            fx.memory_fence(ordering=AtomicOrdering.Release)
            if lane == 0:
                fx.generic_store(flag, tag, memory_order=AtomicOrdering.Monotonic)
        elif release == "no fence":
            if lane == 0:
                fx.generic_store(flag, tag, memory_order=AtomicOrdering.Monotonic)
        elif lane == 0:
            text = "buffer_wbl2 sc0 sc1\n global_store_dword $0, $1, off sc0 sc1"
            fn.inline_asm(None, [flag.llvm_ptr, tag], text, "v,v,~{memory}")

    @flyc.jit
    def launch(DATA: fx.Tensor, FLAG: fx.Tensor, value: fx.Float32, tag: fx.Int32, stream: fx.Stream = STREAM):
        write(DATA, FLAG, value, tag).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def collect(*, acquire: bool = True, baked_tag: int | None = None) -> Any:
    """Wait for the flag, then copy the data out; `baked_tag` waits for a constant instead of the argument."""

    @flyc.kernel
    def read(DATA: fx.Tensor, FLAG: fx.Tensor, OUT: fx.Tensor, tag: fx.Int32, early: fx.Int32):
        lane = fx.thread_idx.x
        want = tag if baked_tag is None else fx.Int32(baked_tag)
        before = fx.Float32(0.0)
        if early > 0:
            before = DATA[lane]  # leaves copies in this CU's L1 and this XCD's L2
        seen = fx.Int32(0)
        while seen != want:
            seen = fx.generic_load(fx.get_iter(FLAG), memory_order=AtomicOrdering.Monotonic)
            fn.sleep(1)
        if acquire:
            fx.memory_fence(ordering=AtomicOrdering.Acquire)
        value = fx.generic_load(fx.get_iter(DATA) + lane, memory_order=AtomicOrdering.Monotonic, syncscope=fn.WORKGROUP)
        OUT[lane] = value
        OUT[lane + 64] = before

    @flyc.jit
    def launch(
        DATA: fx.Tensor, FLAG: fx.Tensor, OUT: fx.Tensor, tag: fx.Int32, early: fx.Int32, stream: fx.Stream = STREAM
    ):
        read(DATA, FLAG, OUT, tag, early).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def persistent(blocks: int, *, iterations: int = 3, fenced: bool = True, lds_bytes: int = 0) -> Any:
    """Every iteration: blocks write their part, meet at a grid barrier, then each sums all parts.

    `fenced` False counts the arrival before the block's own writes are visible (aiter pull request 4007).
    """

    @fx.struct
    class Shared:
        pad: fx.Array[fx.Float32, max(lds_bytes // 4, 4), 16]

    @flyc.kernel
    def loop(X: fx.Tensor, PART: fx.Tensor, COUNT: fx.Tensor, Y: fx.Tensor):
        block, lane = fx.block_idx.x, fx.thread_idx.x
        shared = fx.SharedAllocator().allocate(Shared).peek().pad.view(fx.make_layout(4, 1))
        shared[lane % 4] = fx.Float32(0.0)
        count = fx.get_iter(COUNT)
        for i in range(iterations):
            step = fx.Int32(i)
            total = fn.coop.warp_sum(X[block * 64 + lane] * (step + 1).to(fx.Float32))
            if lane == 0:
                PART[step, block] = total
                if fenced:
                    fx.memory_fence(ordering=AtomicOrdering.Release, syncscope=fn.AGENT)
                fx.atomic_add(count, fx.Int32(1), syncscope=fn.AGENT)
                arrived = fx.Int32(0)
                while arrived < (step + 1) * blocks:
                    arrived = fx.generic_load(count, memory_order=AtomicOrdering.Monotonic, syncscope=fn.AGENT)
                    fn.sleep(1)
                fx.memory_fence(ordering=AtomicOrdering.Acquire, syncscope=fn.AGENT)
                result = fx.Float32(0.0)
                for b in range_constexpr(blocks):
                    result = result + PART[step, b]
                Y[step, block] = result

    @flyc.jit
    def launch(X: fx.Tensor, PART: fx.Tensor, COUNT: fx.Tensor, Y: fx.Tensor, stream: fx.Stream = STREAM):
        loop(X, PART, COUNT, Y).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def two_words(waited: bool) -> Any:
    """Value and tag in words of their own, both system scope; without the wait the tag may overtake the value."""

    @flyc.kernel
    def produce(VALUE: fx.Tensor, TAG: fx.Tensor, rounds: fx.Int32, base: fx.Int32):
        if fx.thread_idx.x == 0:
            for r in range(rounds):
                at = fx.Int32(r) * 32
                fx.generic_store(fx.get_iter(VALUE) + at, fx.Int32(r) * 3 + 7, memory_order=AtomicOrdering.Monotonic)
                if waited:
                    fn.waitcnt_vmem()
                fx.generic_store(fx.get_iter(TAG) + at, base + fx.Int32(r) + 1, memory_order=AtomicOrdering.Monotonic)

    @flyc.jit
    def launch(VALUE: fx.Tensor, TAG: fx.Tensor, rounds: fx.Int32, base: fx.Int32, stream: fx.Stream = STREAM):
        produce(VALUE, TAG, rounds, base).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def two_words_consumer() -> Any:
    """Waits for each tag, then loads its value; system scope throughout."""

    @flyc.kernel
    def consume(VALUE: fx.Tensor, TAG: fx.Tensor, OUT: fx.Tensor, rounds: fx.Int32, base: fx.Int32):
        if fx.thread_idx.x == 0:
            for r in range(rounds):
                at, tag = fx.Int32(r) * 32, fx.Int32(0)
                while tag != base + fx.Int32(r) + 1:
                    tag = fx.generic_load(fx.get_iter(TAG) + at, memory_order=AtomicOrdering.Monotonic)
                    fn.sleep(1)
                OUT[fx.block_idx.x, fx.Int32(r)] = fx.generic_load(
                    fx.get_iter(VALUE) + at, memory_order=AtomicOrdering.Monotonic
                )

    @flyc.jit
    def launch(
        VALUE: fx.Tensor, TAG: fx.Tensor, OUT: fx.Tensor, rounds: fx.Int32, base: fx.Int32, blocks: fx.Int32,
        stream: fx.Stream = STREAM,
    ):  # fmt: skip
        consume(VALUE, TAG, OUT, rounds, base).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)

    return launch
