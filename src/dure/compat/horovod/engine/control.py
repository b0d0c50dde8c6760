"""Connections between rank 0 and the other ranks for requests and responses: JSON with a length in front."""

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dure.documents import parse_json

MESSAGE_LIMIT_BYTES = 64 * 2**20
"""Maximum bytes of one message."""
_BUFFER_BYTES = 4 * 2**20
"""Requested size of a socket's buffers: sending is not to wait for a rank that executes a collective."""
_LENGTH = struct.Struct("!I")
_HELLO_LIMIT_BYTES = 4096
_HELLO_SECONDS = 10.0


class Closed(ConnectionError):
    """End of a connection whose other end has not said goodbye."""


class Channel:
    """Connection to one other rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        connection.settimeout(None)
        self._connection = connection
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: The connection is closed.
        """
        self.send_bytes(encoded(message))

    def send_bytes(self, data: bytes) -> None:
        """Send the result of `encoded`.

        Raises:
            OSError: The connection is closed.
        """
        self._connection.sendall(data)

    def receive(self) -> Iterator[Any]:
        """Read once, and return the messages that are complete.

        Raises:
            Closed: The other end has gone.
        """
        try:
            data = self._connection.recv(2**18)
        except OSError as error:
            raise Closed(error.strerror) from None
        if not data:
            raise Closed("connection closed")
        self._received += data
        return self.received()

    def received(self) -> Iterator[Any]:
        """Return the complete messages that have been read already."""
        return self._messages()

    def _messages(self, limit: int = MESSAGE_LIMIT_BYTES) -> Iterator[Any]:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > limit:
                raise Closed(f"a message of {length} bytes is over the limit of {limit}")
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            data = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield parse_json(data, may_repeat_keys=True, most_depth=None)

    def receive_hello(self, seconds: float, limit: int = _HELLO_LIMIT_BYTES) -> Any:
        """Wait for the first message, and return it.

        Raises:
            Closed: The other end has gone, sent no message in time or something else.
        """
        deadline = time.monotonic() + seconds
        try:
            while True:
                for message in self._messages(limit):
                    return message
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = self._connection.recv(_HELLO_LIMIT_BYTES)
                if not data:
                    raise Closed("connection closed")
                self._received += data
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from None
        finally:
            if self._connection.fileno() >= 0:
                self._connection.settimeout(None)

    def finish(self, seconds: float) -> None:
        """Send no more, and wait until the other end has closed: it would lose messages if this one closed first."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(seconds)
            while self._connection.recv(2**16):
                pass

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def encoded(message: Any) -> bytes:
    """Return a message as it is sent."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MESSAGE_LIMIT_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is over the limit of {MESSAGE_LIMIT_BYTES}")
    return _LENGTH.pack(len(data)) + data


class Reception:
    """Listener of rank 0, which admits each other rank once."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.token = secrets.token_hex(16)
        """Secret of this start: who knows it has read the ranks' store."""
        self.address: tuple[str, int] = (host, int(self._listener.getsockname()[1]))

    def admit(self, world_size: int, seconds: float) -> dict[int, tuple[Channel, dict[str, Any]]]:
        """Wait for all other ranks; return each one's channel and greeting.

        Raises:
            TimeoutError: Some are missing; the message names them.
        """
        admitted: dict[int, tuple[Channel, dict[str, Any]]] = {}
        deadline = time.monotonic() + seconds
        while len(admitted) < world_size - 1:
            left = deadline - time.monotonic()
            self._listener.settimeout(max(0.001, min(1.0, left)))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if left <= 0:
                    missing = [rank for rank in range(1, world_size) if rank not in admitted]
                    raise TimeoutError(f"waited {seconds:g} s in vain for ranks {missing}") from None
                continue
            channel = Channel(connection)
            try:
                hello = channel.receive_hello(_HELLO_SECONDS)
                rank = int(hello["rank"])
                is_ours = hmac.compare_digest(str(hello["token"]).encode(), self.token.encode())
            except (Closed, KeyError, TypeError, ValueError):
                channel.close()
                continue
            if not is_ours or rank in admitted or not 0 < rank < world_size:
                channel.close()
                continue
            admitted[rank] = channel, hello
        return admitted

    def close(self) -> None:
        """Listen no longer."""
        self._listener.close()


def connect(host: str, port: int, hello: dict[str, Any], seconds: float) -> tuple[Channel, Any]:
    """Connect to rank 0 and greet it; return the channel and its reply, for which all ranks have to arrive.

    Raises:
        Closed: Rank 0 has gone.
        OSError: It is not reachable.
    """
    channel = Channel(socket.create_connection((host, port), timeout=seconds))
    channel.send(hello)
    return channel, channel.receive_hello(seconds, MESSAGE_LIMIT_BYTES)
