"""Tests see the installed package only: the checkout leaves the path.

`python -m pytest` puts the checkout first on the path, where its folder `kernels/` looks to `transformers` like the
Hugging Face package of that name, so that its import fails.
"""

import sys
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != _CHECKOUT]
