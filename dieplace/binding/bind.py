"""Carrying a binding out on this process, and reading back what really holds.

The calls set: a container may allow reading a memory policy and forbid setting one (sglang 27368). What could not be
done is told, with the call and its errno; `strict` turns it into an error before anything else happens.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dieplace import numberlist
from dieplace.binding import mempolicy
from dieplace.binding.host import status_lists
from dieplace.binding.plan import Binding
from dieplace.errors import DieplaceError, NotAllowed, Unsupported
from dieplace.sysfs import errno_name


@dataclass(frozen=True)
class Bound:
    """What holds now: `cpus` as read back, the memory policy and nodes as read back (None: cannot be read).

    `failures` are sentences about what was wanted and does not hold; `threads_missed` are thread ids whose CPUs or
    memory policy could not be set.
    """

    cpus: tuple[int, ...]
    policy: str | None
    nodes: tuple[int, ...]
    failures: tuple[str, ...] = ()
    threads_missed: tuple[int, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def carry_out(binding: Binding, *, strict: bool = False, every_thread: bool = False) -> Bound:
    """Bind this thread (or every thread of the process to the CPUs), then read back.

    With `strict` NotAllowed where the kernel refuses (EPERM), Unsupported where it cannot be or does not hold.
    """
    failures: list[tuple[str, int]] = [(text, errno.ENOENT) for text in binding.incomplete]
    missed: tuple[int, ...] = ()
    if binding.cpus is not None:
        missed = _set_cpus(binding.cpus, every_thread, failures)
    if binding.policy is not None:
        nodes = binding.nodes
        _attempt("set_mempolicy", lambda: mempolicy.set_policy(binding.policy or "", nodes), failures)
        if every_thread:
            missed = tuple(sorted({*missed, *_other_threads()}))
    cpus, policy, held = read_back()
    _compare(binding, cpus, policy, held, failures)
    if strict and failures:
        raise _refused(failures)
    return Bound(cpus, policy, held, tuple(text for text, _ in failures), missed)


def read_back() -> tuple[tuple[int, ...], str | None, tuple[int, ...]]:
    """(CPUs, policy word, nodes) of this thread: the CPUs from `/proc`, as a checker outside would see them."""
    cpus, _ = status_lists(_own_status())
    if cpus is None:
        cpus = tuple(sorted(os.sched_getaffinity(0)))
    try:
        policy, nodes = mempolicy.get_policy()
    except OSError:
        return cpus, None, ()
    return cpus, policy, nodes


def _own_status() -> str:
    for path in ("/proc/thread-self/status", "/proc/self/status"):
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            continue
    return ""


def _set_cpus(cpus: tuple[int, ...], every_thread: bool, failures: list[tuple[str, int]]) -> tuple[int, ...]:
    # An empty set would widen to every CPU in psutil and be refused here; a plan never has one.
    if not every_thread:
        _attempt("sched_setaffinity", lambda: os.sched_setaffinity(0, cpus), failures)
        return ()
    done: set[int] = set()
    missed: set[int] = set()
    while pending := set(_threads()) - done - missed:  # threads may start while we are at it
        for thread in pending:
            try:
                os.sched_setaffinity(thread, cpus)
                done.add(thread)
            except ProcessLookupError:
                done.add(thread)
            except OSError as error:
                missed.add(thread)
                failures.append((f"sched_setaffinity on thread {thread}: {_said(error)}", error.errno or 0))
    return tuple(sorted(missed))


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]


def _other_threads() -> list[int]:
    import threading

    return [thread for thread in _threads() if thread not in (0, threading.get_native_id())]


def _attempt(call: str, act: Callable[[], None], failures: list[tuple[str, int]]) -> None:
    try:
        act()
    except OSError as error:
        failures.append((f"{call}: {_said(error)}", error.errno or 0))


def _said(error: OSError) -> str:
    name = errno_name(error.errno)
    why = {
        "EPERM": "forbidden here, as container runtimes do; allow the call in the seccomp profile",
        "EINVAL": "the kernel does not take these numbers (not online, or outside the cpuset)",
        "ENOSYS": "this kernel has no such call",
    }.get(name, error.strerror or "")
    return f"{name} ({why})"


def _compare(
    binding: Binding, cpus: tuple[int, ...], policy: str | None, nodes: tuple[int, ...], failures: list[tuple[str, int]]
) -> None:
    if binding.cpus is not None and cpus != tuple(sorted(binding.cpus)) and not _told(failures, "sched_setaffinity"):
        wanted, got = numberlist.show(binding.cpus), numberlist.show(cpus)
        failures.append((f"CPUs {wanted} were set, and the kernel reads back {got}", errno.EINVAL))
    if binding.policy is None or _told(failures, "set_mempolicy") or policy is None:
        return
    if (policy, nodes) != (binding.policy, tuple(sorted(binding.nodes))):
        wanted = f"{binding.policy} {numberlist.show(binding.nodes)}"
        failures.append(
            (f"{wanted} was set, and the kernel reads back {policy} {numberlist.show(nodes)}", errno.EINVAL)
        )


def _told(failures: list[tuple[str, int]], call: str) -> bool:
    return any(text.startswith(call) for text, _ in failures)


def _refused(failures: list[tuple[str, int]]) -> DieplaceError:
    text = "; ".join(text for text, _ in failures)
    kind = NotAllowed if any(code in (errno.EPERM, errno.EACCES) for _, code in failures) else Unsupported
    return kind(f"--strict, and the binding does not hold: {text}", hint="leave --strict out to start all the same",
                failures=[text for text, _ in failures])  # fmt: skip
