"""The `kernel` group: what each command does is in its own module, imported when it runs."""

from __future__ import annotations

from dieplace.cli.main import LazyGroup

kernel = LazyGroup(
    name="kernel",
    help="List, build, check, trace and lint kernels.",
    table={
        "list": ("dieplace.cli.kernel_build:list_kernels", "List ops and the backends that have a kernel for them."),
        "build": ("dieplace.cli.kernel_build:build", "Compile kernels for gfx950 and show what they need."),
        "check": ("dieplace.cli.kernel_build:check", "Check kernels against the float64 reference."),
        "trace": ("dieplace.cli.kernel_trace:trace", "Run one kernel on the emulated card and count what it moved."),
        "lint": ("dieplace.cli.kernel_lint:lint_command", "Find what FlyDSL accepts silently and gets wrong."),
    },
)
