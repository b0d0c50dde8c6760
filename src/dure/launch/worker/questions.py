"""Requests to one rank and its replies, on a socket; the thread of `dure.launch.worker.responder` replies."""

import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dure.documents import parse_json
from dure.launch.worker.responder import LENGTH

_MOST_BYTES = 2**20


class Questions:
    """Channel for requests to a rank and its replies; no method blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._number = 0
        self._data = bytearray()
        self._answers: dict[int, dict[str, Any]] = {}
        self.is_over = False
        """True if the rank has closed its end."""
        self.is_free = True
        """True if no request is pending; a rank that cannot reply must not find a thousand requests later."""

    def ask(self, what: str) -> int:
        """Send a request, and return its number; a reply to an earlier request does not match it."""
        self._number += 1
        self._answers.clear()
        self.is_free = False
        with suppress(OSError):  # it has ended, or has not read for long
            self._connection.send(f"{what} {self._number}\n".encode(), socket.MSG_DONTWAIT)
        return self._number

    def take(self, number: int) -> dict[str, Any] | None:
        """Return the reply to a request, or None if it has not arrived."""
        self._receive()
        return self._answers.pop(number, None)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def _received(self) -> bytes:
        try:
            return self._connection.recv(_MOST_BYTES, socket.MSG_DONTWAIT)
        except ConnectionError:
            return b""

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            while data := self._received():
                self._data += data
            self.is_over = True
        while len(self._data) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._data)
            if len(self._data) < LENGTH.size + size:
                return
            body = bytes(self._data[LENGTH.size : LENGTH.size + size])
            del self._data[: LENGTH.size + size]
            answer = parse_json(body)
            self._answers[answer["number"]] = answer
            self.is_free = answer["number"] == self._number


def wait_for_answers(questions: Sequence[Questions], most_seconds: float) -> None:
    """Return when one of them may have a reply, or after `most_seconds`."""
    poll = select.poll()
    for one in questions:
        poll.register(one.fileno(), select.POLLIN)
    poll.poll(most_seconds * 1000)
