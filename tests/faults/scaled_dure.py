"""`dure` with its limits for hangs divided by five: what takes a script a minute takes a test some seconds."""

import sys

from dure.launch.hangs import watchdog
from dure.launch.rounds import round as round_module

SCALE = 5
for name in ("LEAST_SECONDS", "UNKNOWN_SECONDS"):
    scaled = getattr(watchdog, name) / SCALE
    for module in (watchdog, round_module):
        setattr(module, name, scaled)

if __name__ == "__main__":
    from dure.cli import main

    sys.exit(main())
