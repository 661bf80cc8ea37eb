"""`python -m dieplace.cli` is the same as the `dieplace` command."""

import sys

from dieplace.cli.main import main

sys.exit(main())
