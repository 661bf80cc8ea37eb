# Sourced by the scripts beside it: makes .venv and installs the lock, once; says what it does, in one line a step.
# After it, the working folder is the checkout and BIN is the environment's bin folder.

say() { printf 'dieplace: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P) || exit 1
cd -- "$ROOT" || exit 1
VENV=$ROOT/.venv
BIN=$VENV/bin
STAMP=$VENV/dieplace-installed
LOG=$VENV/dieplace-install.log

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    local found
    found=$("${PYTHON:-python3}" -c 'import platform; print(platform.python_version())' 2>/dev/null) || found=none
    stop "Python 3.11 or newer is needed and ${PYTHON:-python3} is $found: install it, or name one with PYTHON=/path/to/python"
}

make_environment() {
    local python
    python=$(find_python) || exit 1
    say "making .venv with $("$python" -c 'import platform, sys; print(sys.executable, platform.python_version())')"
    if ! "$python" -m venv "$VENV" >"$ROOT/.venv-trouble" 2>&1; then
        local why
        why=$(tail -n 1 "$ROOT/.venv-trouble")
        rm -rf -- "$VENV" "$ROOT/.venv-trouble"
        stop "this Python cannot make an environment: install its venv package (Debian and Ubuntu: apt install python3-venv); it said: $why"
    fi
    rm -f -- "$ROOT/.venv-trouble"
}

pip_install() {
    "$BIN/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1 && return 0
    if grep -qiE 'NewConnectionError|Failed to establish|Name or service not known|Temporary failure in name|ProxyError|ConnectTimeout|Network is unreachable|No matching distribution' "$LOG"; then
        stop "the packages could not be fetched: the package index was not reached, or lacks one of them (details: $LOG)"
    fi
    stop "installing failed: $(grep -iE '^ *error' "$LOG" | tail -n 1) (details: $LOG)"
}

install_lock() {
    : >"$LOG"
    say "installing the packages of requirements.lock into .venv (a few minutes the first time)"
    pip_install -r requirements.lock
    # A GPU build of torch brings the Triton that fits it; a CPU build brings none.
    if ! "$BIN/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)'; then
        pip_install -r requirements-cpu.lock
    fi
    pip_install --no-deps --no-build-isolation -e .
}

# A folder named dieplace (this checkout, seen from the folder above it) is an empty package to Python's path search,
# which comes before the finder that pip adds for a package in place: put that finder first.
put_checkout_first() {
    local site
    site=$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 0
    printf '%s\n' 'import sys; sys.meta_path.sort(key=lambda f: "__editable___dieplace" not in getattr(f, "__module__", ""))' >"$site/dieplace-checkout-first.pth"
}

wanted_stamp() {
    cat requirements.lock requirements-cpu.lock pyproject.toml setup.py | "$BIN/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.prefix)'
}

if ! "$BIN/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    if [ -e "$VENV" ]; then
        say "the Python behind .venv is gone or too old; making .venv anew"
        rm -rf -- "$VENV"
    fi
    make_environment
fi
if [ "$(cat "$STAMP" 2>/dev/null)" != "$(wanted_stamp)" ]; then
    install_lock
    wanted_stamp >"$STAMP"
fi
compgen -G "$VENV/lib/python3*/site-packages/dieplace-checkout-first.pth" >/dev/null || put_checkout_first
