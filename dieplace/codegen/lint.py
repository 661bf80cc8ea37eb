"""Finds in kernel sources what FlyDSL 0.5.0 accepts silently and compiles to something else.

A kernel is a function under `@flyc.kernel`; its helpers are the functions it calls by name in the same file or imports
from another linted one. Values that come from a kernel's arguments, thread and block ids, or loads are run-time values;
an `if` over them becomes a branch on the device, one over Python values is decided while tracing. Where the difference
cannot be told from the source (a closure variable), the condition counts as a Python value: closures are constants.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dieplace.errors import UsageError

RULES = {
    "early-return": "`return` inside run-time control flow is dropped: the code after it runs for all lanes",
    "break": "`break` inside a run-time loop is not supported: carry the condition in the loop",
    "continue": "`continue` inside a run-time loop is not supported: put the rest under a condition",
    "grid-dim": "`grid_dim` needs device bitcode that is not there without ROCm: pass the block count as an argument",
    "tanh": "`tanh` compiles to an empty kernel: write it with exp2",
    "print": "`print` prints while tracing and never on the device",
    "unsigned-byte": "an unsigned byte arrives signed (200 as -56): use `& 255` or flydsl_names.u8",
    "asm-wait": "an inline load's value is used before it arrived: put its s_waitcnt into the same block",
    "asm-early-clobber": "an inline load's outputs need early clobber (`=&v`), or they share registers with inputs",
}
_STATIC_LOOPS = {"range_constexpr"}
_STATIC_TESTS = {"const_expr"}
_WAITS = ("vmcnt(0)", "lgkmcnt(0)")
_UNSIGNED_TYPES = {"Uint8", "UInt8"}


@dataclass(frozen=True)
class Finding:
    """One place in a source: rule, file, 1-based line, and the function it is in."""

    rule: str
    path: str
    line: int
    function: str

    @property
    def message(self) -> str:
        """What is wrong and what to do."""
        return RULES[self.rule]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message} (in {self.function})"


@dataclass(frozen=True)
class LintResult:
    """Findings in order of file and line, the files read, and the kernels and helpers looked at."""

    findings: tuple[Finding, ...]
    files: tuple[str, ...]
    kernels: int
    helpers: int


def lint(paths: Iterable[Path]) -> LintResult:
    """Lint files and folders; UsageError for a path that is missing or does not parse.

    Of a folder every `.py` below it is read, but those of installed packages and hidden folders.
    """
    files = [file for path in paths for file in _files(path)]
    modules = {file: _parse(file) for file in dict.fromkeys(files)}
    shared = {name: fn for tree in modules.values() for name, fn in _functions(tree).items()}
    findings: list[Finding] = []
    kernels = helpers = 0
    for file, tree in modules.items():
        local = _functions(tree)
        own_kernels = [fn for fn in ast.walk(tree) if isinstance(fn, ast.FunctionDef) and _is_kernel(fn)]
        called = _helpers(own_kernels, local, _imported(tree), shared)
        kernels, helpers = kernels + len(own_kernels), helpers + len([h for h in called if h in set(local.values())])
        for fn in own_kernels:
            findings += _Function(str(file), fn, kernel=True).check()
        for fn in called:
            home = file if fn in set(local.values()) else next(f for f, t in modules.items() if fn in ast.walk(t))
            findings += _Function(str(home), fn, kernel=False).check()
    unique = sorted(dict.fromkeys(findings), key=lambda f: (f.path, f.line, f.rule))
    return LintResult(tuple(unique), tuple(str(f) for f in modules), kernels, helpers)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.rglob("*.py") if not _foreign(p.relative_to(path)))
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    return [path]


def _foreign(inside: Path) -> bool:
    """Installed packages and hidden folders (`.venv`, `.git`) below a folder that was named."""
    folders = inside.parts[:-1]
    return any(name.startswith(".") or name in ("site-packages", "__pycache__") for name in folders)


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(), str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"cannot read {file} as Python: {error}") from error


def _functions(tree: ast.AST) -> dict[str, ast.FunctionDef]:
    return {fn.name: fn for fn in ast.walk(tree) if isinstance(fn, ast.FunctionDef)}


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name -> name in the module it was imported from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: alias.name for alias in node.names})
    return found


def _is_kernel(fn: ast.FunctionDef) -> bool:
    return any(_name(d.func if isinstance(d, ast.Call) else d) == "kernel" for d in fn.decorator_list)


def _is_launcher(fn: ast.FunctionDef) -> bool:
    return any(_name(d.func if isinstance(d, ast.Call) else d) == "jit" for d in fn.decorator_list)


def _name(node: ast.AST) -> str:
    """The last part of a dotted name, or an empty string."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _helpers(
    kernels: Sequence[ast.FunctionDef],
    local: dict[str, ast.FunctionDef],
    imported: dict[str, str],
    shared: dict[str, ast.FunctionDef],
) -> list[ast.FunctionDef]:
    """Functions that kernels call by plain name, or as module attributes, followed through their own calls."""
    found: dict[ast.FunctionDef, None] = {}
    waiting = list(kernels)
    while waiting:
        for node in ast.walk(waiting.pop()):
            if not isinstance(node, ast.Call):
                continue
            name = _name(node.func)
            target = local.get(name) if isinstance(node.func, ast.Name) else None
            target = target or shared.get(imported.get(name, name if isinstance(node.func, ast.Attribute) else ""))
            if target and target not in found and not _is_kernel(target) and not _is_launcher(target):
                found[target] = None
                waiting.append(target)
    return list(found)


class _Function:
    """Checks one kernel or helper; keeps the names that hold run-time values."""

    def __init__(self, path: str, fn: ast.FunctionDef, *, kernel: bool) -> None:
        self.path, self.fn = path, fn
        arguments = [a for a in (*fn.args.posonlyargs, *fn.args.args) if not _is_constant(a)]
        # A helper's arguments may be either; treating them as run-time values is what finds a dropped return.
        self.runtime = {a.arg for a in arguments}
        self.kernel = kernel
        self.findings: list[Finding] = []

    def check(self) -> list[Finding]:
        """All findings in this function; nested kernels are checked on their own."""
        for _ in range(2):  # a name can become run-time by a later assignment in a loop
            for node in self._own(self.fn):
                self._learn(node)
        self._statements(self.fn.body, dynamic=False)
        for node in self._own(self.fn):
            self._expression(node)
        return self.findings

    def _own(self, node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef) and (_is_kernel(child) or _is_launcher(child)):
                continue
            yield child
            yield from self._own(child)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            if self._is_runtime(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.runtime |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.For) and self._is_runtime_loop(node):
            self.runtime |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}

    def _is_runtime(self, node: ast.AST) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and _name(part.func) in _STATIC_TESTS:
                return False
            if isinstance(part, ast.Name) and part.id in self.runtime:
                return True
            if isinstance(part, ast.Attribute) and part.attr in ("thread_idx", "block_idx", "block_dim", "grid_dim"):
                return True
            if isinstance(part, ast.Call) and _name(part.func) in ("xcc_id", "generic_load", "memtime", "lane_id"):
                return True
            if isinstance(part, ast.Call) and _dotted(part.func).startswith(("fx.Int", "fx.Uint", "fx.Float")):
                return True
        return False

    def _is_runtime_loop(self, node: ast.For) -> bool:
        if isinstance(node.iter, ast.Call):
            name = _name(node.iter.func)
            return name == "range" and name not in _STATIC_LOOPS
        return False

    def _statements(self, body: Sequence[ast.stmt], *, dynamic: bool, loop: bool = False) -> None:
        for node in body:
            if isinstance(node, ast.Return) and dynamic:
                self._add("early-return", node)
            elif isinstance(node, (ast.Break, ast.Continue)) and (loop or dynamic):
                self._add("break" if isinstance(node, ast.Break) else "continue", node)
            elif isinstance(node, ast.If):
                inside = dynamic or self._is_runtime(node.test)
                self._statements(node.body, dynamic=inside, loop=loop)
                self._statements(node.orelse, dynamic=inside, loop=loop)
            elif isinstance(node, (ast.For, ast.While)):
                # `range` in a kernel is a device loop whatever its bound; so is every `while` over run-time values.
                run = self._is_runtime_loop(node) if isinstance(node, ast.For) else self._is_runtime(node.test)
                self._statements(node.body, dynamic=dynamic or run, loop=run)
                self._statements(node.orelse, dynamic=dynamic or run, loop=loop)
            elif isinstance(node, (ast.With, ast.Try)):
                self._statements(node.body, dynamic=dynamic, loop=loop)

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and node.attr == "grid_dim":
            self._add("grid-dim", node)
        if not isinstance(node, ast.Call):
            return
        name = _name(node.func)
        if name == "tanh":
            self._add("tanh", node)
        elif name == "print" and isinstance(node.func, ast.Name):
            self._add("print", node)
        elif name == "inline_asm":
            self._asm(node)
        elif name in ("Int32", "Uint32", "Int64", "Uint64") and node.args:
            self._widened(node)

    def _widened(self, node: ast.Call) -> None:
        """A fragment of unsigned bytes that is widened without a mask."""
        source = node.args[0]
        loads = [p for p in ast.walk(source) if isinstance(p, ast.Call) and _name(p.func) == "load"]
        for load in loads:
            fragment = _name(load.func.value) if isinstance(load.func, ast.Attribute) else ""
            if fragment in self._byte_fragments() and not self._masked(node):
                self._add("unsigned-byte", node)

    def _byte_fragments(self) -> set[str]:
        found = set()
        for node in self._own(self.fn):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                types = {_name(a) for a in node.value.args}
                if _name(node.value.func) == "make_rmem_tensor" and types & _UNSIGNED_TYPES:
                    found |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        return found

    def _masked(self, call: ast.Call) -> bool:
        for node in self._own(self.fn):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) and call in (node.left, node.right):
                return True
            if isinstance(node, ast.Call) and _name(node.func) == "u8" and call in node.args:
                return True
        shifted = [n for n in self._own(self.fn) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.LShift)]
        # `byte << 24` and more pushes the wrong sign bits out of an Int32; `<< 23` leaves one of them.
        return any(n.left is call and isinstance(n.right, ast.Constant) and n.right.value == 24 for n in shifted)

    def _asm(self, node: ast.Call) -> None:
        texts = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        for rule in asm_faults([t for t in texts if isinstance(t, str)]):
            self._add(rule, node)

    def _add(self, rule: str, node: ast.AST) -> None:
        self.findings.append(Finding(rule, self.path, node.lineno, self.fn.name))  # type: ignore[attr-defined]


def asm_faults(strings: Sequence[str]) -> list[str]:
    """Rules that an inline assembly block breaks, given text and constraints (rocm-systems pull request 8721)."""
    if not any("_load_" in t or "ds_read" in t for t in strings):
        return []
    waits = any(w in t for t in strings for w in _WAITS)
    shared = any(part.startswith("=") and not part.startswith("=&") for t in strings for part in t.split(","))
    return [*([] if waits else ["asm-wait"]), *(["asm-early-clobber"] if shared else [])]


def _is_constant(argument: ast.arg) -> bool:
    """Whether an annotation says that the argument is a Python value: anything but none, Any and FlyDSL's types."""
    if argument.annotation is None:
        return False
    note = ast.unparse(argument.annotation).strip("'\"")
    return "Constexpr" in note or not (note == "Any" or note.startswith(("fx.", "Tensor", "Vector")))


def _dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
