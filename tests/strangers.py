"""Strangers at a run's ports: connections from none of its processes."""

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Return the addresses and ports on which a process and its children listen, as the kernel lists them."""
    inodes = set()
    for pid in (process.pid, *(child.pid for child in process.children(recursive=True))):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if (target := os.readlink(descriptor)).startswith("socket:"):
                inodes.add(target[8:-1])
    found = []
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                words = bytes.fromhex(address)
                raw = b"".join(struct.pack(">I", struct.unpack_from("<I", words, at)[0]) for at in range(0, size, 4))
                family = socket.AF_INET if size == 4 else socket.AF_INET6
                found.append((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _flood(connection: socket.socket) -> None:
    connection.settimeout(5.0)
    for _ in range(8):
        connection.sendall(os.urandom(2**16))


def _say_twice(connection: socket.socket) -> None:
    for _ in range(2):
        connection.sendall(b"\0\0\0\x02{}")


MANNERS: dict[str, Callable[[socket.socket], object]] = {
    "a browser": lambda connection: connection.sendall(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n"),
    "a great length": lambda connection: connection.sendall(b"\xff" * 64),
    "zeros": lambda connection: connection.sendall(b"\0" * 4096),
    "too much": _flood,
    "twice": _say_twice,
    "nothing": lambda connection: None,
    "reset": _reset,
}
"""Ways of a stranger to talk before it leaves; those that only leave come last, for some listeners end with them."""


def disturb(process: psutil.Process) -> list[socket.socket]:
    """Come to every port of a process and its children in every manner, and once to stay: those are returned."""
    stay = []
    for address, port in sorted(set(listening(process))):
        for manner in MANNERS.values():
            with suppress(OSError), socket.create_connection((address, port), timeout=5.0) as connection:
                manner(connection)
        with suppress(OSError):
            stay.append(socket.create_connection((address, port), timeout=5.0))
    return stay
