"""`python -m dure` is `dure`."""

import sys

from dure.cli import main

sys.exit(main())
