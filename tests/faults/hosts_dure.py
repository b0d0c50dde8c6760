"""`dure` on a host with a clock of its own, and with limits for silent hosts divided: what takes 13 s takes 4."""

import os
import sys
import time

from dure.launch.nodes import channel, rendezvous
from dure.launch.nodes import connections as links
from dure.launch.nodes import peers as nodes

SCALE = 3
for module, name in (
    (nodes, "BEAT_SECONDS"),
    (nodes, "LOST_SECONDS"),
    (nodes, "LEADER_LOST_SECONDS"),
    (links, "QUIET_SECONDS"),
    (rendezvous, "LAST_CALL_SECONDS"),
):
    setattr(module, name, getattr(module, name) / SCALE)
channel.DEAD_SECONDS, channel._PROBE_SECONDS = 6, 2

CLOCK, AHEAD_SECONDS = time.time, float(os.environ.get("CLOCK_AHEAD_SECONDS", "0"))
time.time = lambda: CLOCK() + AHEAD_SECONDS

if __name__ == "__main__":
    from dure.cli import main

    sys.exit(main(sys.argv[1:]))
