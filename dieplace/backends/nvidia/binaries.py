"""Moved to `dieplace.backends.triton_binaries`; this name goes once its last user has moved."""

import sys

from dieplace.backends import triton_binaries

sys.modules[__name__] = triton_binaries
