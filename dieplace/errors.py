"""Every error dieplace raises on purpose, grouped by who can act.

DieplaceError
├── UsageError              the caller: a wrong word, an unreadable file, an unknown name (exit 2)
├── Unsupported             nobody here: this host cannot do it (exit 3)
│   ├── NoBackend           no backend's probe said yes; carries each reason
│   ├── NoSuchDevice        no such card, device or domain on this machine
│   └── NoSuchMode          the card does not offer that mode; carries what it offers
├── NotAllowed              root: needs privilege (exit 4)
├── Busy                    the holder's owner: somebody uses the device, or the view is incomplete (exit 5)
├── PlacementError          the caller: memory cannot go, or is not, where it was asked (exit 3)
│   ├── DomainFull          asked, free, total, domain
│   └── Misplaced           the audit says no (exit 1)
├── ApplyFailed             the operator: changed but unverified, pending or rolled back (exit 6)
│   ├── NotVerified
│   ├── Pending
│   ├── RolledBack
│   └── StaleMachine        the machine changed under this snapshot; discover again
├── CheckFailed             a check that was asked for says no (exit 1)
├── Incomparable            two runs differ in conditions that must be equal (exit 2)
├── CompileError            a kernel does not compile, or compiles to something unusable (exit 3)
├── KernelFault             an emulated kernel did something a device would not survive (exit 3)
├── Declined                the question was answered no, or there was nobody to ask (exit 7)
├── BackendError            a vendor library or driver failed; its code and name are kept (exit 3)
└── LaunchFailed            a program could not be started by `exec` for any other reason (exit 125)
    ├── CannotRun           it is there and cannot be run (exit 126)
    └── NotFound            it is not there (exit 127)

Each message says what was asked, what was found and what to do; `hint` repeats the last part alone.
"""

from __future__ import annotations

from typing import Any


class DieplaceError(Exception):
    """Base of all errors; `exit_code` is the command's status, `hint` says what to do, `facts` are plain data."""

    exit_code = 70
    word = "error"

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def to_json(self) -> dict[str, Any]:
        """The keys that the command prints under `error`; values are plain data."""
        return {"word": self.word, "message": self.message, "hint": self.hint, **self.facts}


class UsageError(DieplaceError):
    """A wrong word, file or name: the caller can correct it."""

    exit_code = 2
    word = "usage"


class Unsupported(DieplaceError):
    """This host cannot do what was asked."""

    exit_code = 3
    word = "unsupported"


class NoBackend(Unsupported):
    """No backend is available; `facts["reasons"]` maps each backend to its probe's reason."""

    word = "no-backend"


class NoSuchDevice(Unsupported):
    """No such card, device or domain on this machine; `facts["known"]` lists what there is."""

    word = "no-such-device"


class NoSuchMode(Unsupported):
    """The card does not offer that mode; `facts["offered"]` lists what it offers."""

    word = "no-such-mode"


class NotAllowed(DieplaceError):
    """Needs privilege; the hint is the exact command to run."""

    exit_code = 4
    word = "not-allowed"


class Busy(DieplaceError):
    """Somebody holds the device, or the view of holders is incomplete; `facts["holders"]` lists them."""

    exit_code = 5
    word = "busy"


class PlacementError(DieplaceError):
    """Memory cannot go where it was asked to be."""

    exit_code = 3
    word = "placement"


class DomainFull(PlacementError):
    """A domain has not enough free bytes; facts: asked_bytes, free_bytes, total_bytes, domain."""

    word = "domain-full"


class Misplaced(PlacementError):
    """An audit found bytes elsewhere than they were asked to be."""

    exit_code = 1
    word = "misplaced"


class ApplyFailed(DieplaceError):
    """A mode change did not end as planned; `facts["outcome"]` says how it stands."""

    exit_code = 6
    word = "apply-failed"


class NotVerified(ApplyFailed):
    """Changed, but reading back did not confirm the target."""

    word = "not-verified"


class Pending(ApplyFailed):
    """A memory mode is recorded in the driver and will apply at its next load."""

    word = "pending"


class RolledBack(ApplyFailed):
    """The change failed and the old state was read back and verified."""

    word = "rolled-back"


class StaleMachine(ApplyFailed):
    """The node changed after this snapshot was taken: discover again."""

    word = "stale-machine"


class CheckFailed(DieplaceError):
    """A check that was asked for (assert, audit, compare, kernel check) says no."""

    exit_code = 1
    word = "check-failed"


class Incomparable(DieplaceError):
    """Two runs differ in conditions that must be equal; `facts["differing"]` names the keys."""

    exit_code = 2
    word = "incomparable"


class CompileError(DieplaceError):
    """A kernel does not compile, or compiles to something that must not run."""

    exit_code = 3
    word = "compile"


class KernelFault(DieplaceError):
    """An emulated kernel did something that real hardware would not survive or that reads garbage."""

    exit_code = 3
    word = "kernel-fault"


class Declined(DieplaceError):
    """The question was answered no, or there was no terminal to ask."""

    exit_code = 7
    word = "declined"


class BackendError(DieplaceError):
    """A vendor library or driver failed; `facts["code"]` and `facts["name"]` are the vendor's."""

    exit_code = 3
    word = "backend"


class LaunchFailed(DieplaceError):
    """`exec` failed before the program started, for a reason of ours: 125, as env(1) and nohup(1) have it."""

    exit_code = 125
    word = "launch"


class CannotRun(LaunchFailed):
    """The program is there and cannot be run."""

    exit_code = 126
    word = "cannot-run"


class NotFound(LaunchFailed):
    """There is no such program."""

    exit_code = 127
    word = "not-found"
