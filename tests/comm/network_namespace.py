"""A network of one's own: a loopback interface whose counters nobody else moves."""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def why_not() -> str:
    """Return why this process cannot have one; nothing if it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    pid = os.fork()
    if pid == 0:
        try:
            enter()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"a network namespace needs root: {os.strerror(status)}" if status else ""


def enter() -> None:
    """Move this process, and those that it forks, into a new network, and bring its loopback interface up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = bytearray(struct.pack("16sh14x", b"lo", 0))
        fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        name, flags = struct.unpack("16sh14x", request)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", name, flags | _IFF_UP))


def loopback_bytes() -> tuple[int, int]:
    """Return the bytes that this network's loopback interface has received and sent since it exists."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    raise LookupError("there is no loopback interface")
