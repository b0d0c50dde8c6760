"""A cable of some thousand kilometres between two network namespaces: packets arrive in order, 50 to 300 ms late.

Run as a program with the names of the two and their addresses. It carries packets between two interfaces of its own
(TUN), so that whatever goes between the hosts, to any port, is late.
"""

import ctypes
import fcntl
import math
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

LEAST_SECONDS, MOST_SECONDS = 0.05, 0.3
_PERIOD_SECONDS = 7.0
"""Time in which the delay goes from the least to the most and back."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 2**16


def opened(namespace: str, address: str) -> int:
    """Make an interface in a namespace, and return the descriptor of what goes through it."""
    where = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(where, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(where)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", b"cable", _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "address", "add", f"{address}/24", "dev", "cable"], check=True)
    subprocess.run(["ip", "link", "set", "cable", "up"], check=True)
    return descriptor


def delay(now: float) -> float:
    """Return how late a packet is that is sent now."""
    swing = (1 - math.cos(2 * math.pi * now / _PERIOD_SECONDS)) / 2
    return LEAST_SECONDS + swing * (MOST_SECONDS - LEAST_SECONDS)


def main() -> None:
    """Carry packets until the standard input is closed."""
    ends = opened(sys.argv[1], sys.argv[2]), opened(sys.argv[3], sys.argv[4])
    print("ready", flush=True)
    under_way = deque[tuple[float, bytes]](), deque[tuple[float, bytes]]()
    poll = select.poll()
    for descriptor in (0, *ends):
        poll.register(descriptor, select.POLLIN)
    last = [0.0, 0.0]
    while True:
        due = min((queue[0][0] for queue in under_way if queue), default=time.monotonic() + 1.0)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, due - time.monotonic()) * 1000)}
        if 0 in ready:
            return
        for side, descriptor in enumerate(ends):
            if descriptor in ready:
                now = time.monotonic()
                last[side] = max(last[side], now + delay(now))
                under_way[side].append((last[side], os.read(descriptor, _PACKET_BYTES)))
            queue = under_way[side]
            while queue and queue[0][0] <= time.monotonic():
                try:
                    os.write(ends[1 - side], queue.popleft()[1])
                except OSError:  # that end is down
                    continue


if __name__ == "__main__":
    main()
