"""Moved to `dieplace.backends.torch_timing`; this name goes once its last user has moved."""

import sys

from dieplace.backends import torch_timing

sys.modules[__name__] = torch_timing
