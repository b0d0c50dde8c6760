"""Entry point of `python -m dure`, the same as `dure`."""

import sys

from dure.cli import main

sys.exit(main())
