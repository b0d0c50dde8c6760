"""Authenticated connections between the launchers of one run: every message is verified before use.

Both sides prove that they know the run's secret without sending it (challenge and response, HMAC-SHA256 over both
sides' random numbers), and derive keys for this connection from it, one for each direction. After that every message
carries a counter and an HMAC, so that none can be changed, repeated, dropped or inserted. Messages are JSON, not
encrypted, and of limited length. Any error closes the connection.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import select
import socket
import struct
import time
import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import Any, TypeGuard

from dure.documents import DocumentInvalid, parse_json

MESSAGE_LIMIT_BYTES = 64 * 2**10
HANDSHAKE_LIMIT_BYTES = 512
"""Maximum bytes of a message from a peer that is not yet authenticated."""
HANDSHAKE_SECONDS = 1.0
"""Seconds that a peer has to authenticate itself."""
MOST_GUESTS = 64
"""Maximum number of unauthenticated peers; if there is one more, the oldest is dropped."""
DEAD_SECONDS = 20
"""Seconds without a sign of life from the peer's kernel after which a connection is broken, whatever its launcher does.
"""
_PROBE_SECONDS = 5
_MOST_UNSENT_BYTES = 8 * 2**20
_READ_BYTES = 2**18
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_DIGEST_BYTES = 32
_PROTOCOL = "dure-1"
_NONCE_BYTES = 16
_NONCE = re.compile(rf"[0-9a-f]{{{2 * _NONCE_BYTES}}}")

Address = tuple[Any, ...]
"""Address as in `socket`: host, port, and two more values for IPv6."""


class ChannelClosed(ConnectionError):
    """Closed connection, with the reason."""


class HandshakeRefused(ChannelClosed):
    """Failed authentication: the other side closed the connection after this one's proof, or its own proof is wrong."""


_open: "weakref.WeakSet[Channel | ChannelListener]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the launcher's connections in its ranks: peers must see their end, and ranks must not have the keys."""
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


class Frames:
    """Received bytes, split into bodies: four bytes of length, then as many bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Append received bytes."""
        self._data += data

    def take(self) -> bytes | None:
        """Return the next body, or None while it is incomplete.

        Raises:
            ChannelClosed: It would be too long; nothing of that length is ever stored.
        """
        if len(self._data) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._data)
        if size > self.limit:
            raise ChannelClosed(f"a message of {size} bytes is over the limit of {self.limit}")
        end = _LENGTH.size + size
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        message = parse_json(body)
    except DocumentInvalid as error:
        raise ChannelClosed(f"a message {error}") from None
    if not isinstance(message, dict):
        raise ChannelClosed("a message is no JSON object")
    return message


def _hash(key: bytes, *parts: str) -> bytes:
    return hmac.new(key, "|".join((_PROTOCOL, *parts)).encode(), hashlib.sha256).digest()


class Channel:
    """Connection between authenticated launchers; it never blocks."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _probe(connection)
        self._connection = connection
        self.own_address = str(connection.getsockname()[0])
        self.peer_address = str(connection.getpeername()[0])
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        self._unsent = bytearray()
        self._frames = Frames(MESSAGE_LIMIT_BYTES + _COUNTER.size + _DIGEST_BYTES)
        self.last_received = time.monotonic()
        _open.add(self)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether there is data that the peer has not yet accepted."""
        return bool(self._unsent)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, and keep the part that cannot be sent now.

        Raises:
            ChannelClosed: The peer is gone, or has not read for too long.
            ValueError: The message is too long.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MESSAGE_LIMIT_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is over the limit of {MESSAGE_LIMIT_BYTES}")
        counted = _COUNTER.pack(self._num_sent) + body
        self._num_sent += 1
        self._unsent += _framed(hmac.digest(self._send_key, counted, "sha256") + counted)
        if len(self._unsent) > _MOST_UNSENT_BYTES:
            raise ChannelClosed("it does not read what it is sent")
        self.flush()

    def flush(self) -> None:
        """Send the kept data.

        Raises:
            ChannelClosed: The peer is gone.
        """
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(error.strerror or "the connection is broken") from None

    def receive(self) -> list[dict[str, Any]]:
        """Return the received messages after verification.

        Raises:
            ChannelClosed: The peer is gone, or sent something invalid.
        """
        end, messages = self._read(), self._taken()
        if end is not None and not messages:  # messages before the end are returned first
            raise ChannelClosed(end)
        return messages

    def receive_one(self) -> dict[str, Any] | None:
        """Return the next message after verification, or None; later messages are kept for the next call.

        Raises:
            ChannelClosed: The peer is gone, or sent something invalid.
        """
        end = self._read()
        body = self._frames.take()
        if body is None and end is not None:
            raise ChannelClosed(end)
        return None if body is None else self._checked(body)

    def _read(self) -> str | None:
        """Read available data; return the reason if there will be no more."""
        try:
            while True:
                data = self._connection.recv(_READ_BYTES)
                if not data:
                    return "it closed the connection"
                self._frames.add(data)
                if len(data) < _READ_BYTES:
                    return None
        except BlockingIOError:
            return None
        except OSError as error:
            return error.strerror or "the connection is broken"

    def _taken(self) -> list[dict[str, Any]]:
        messages = []
        while (body := self._frames.take()) is not None:
            messages.append(self._checked(body))
        return messages

    def _checked(self, body: bytes) -> dict[str, Any]:
        digest, counted = body[:_DIGEST_BYTES], body[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, hmac.digest(self._receive_key, counted, "sha256")):
            raise ChannelClosed("a message has a wrong signature")
        if counted[: _COUNTER.size] != _COUNTER.pack(self._num_received):
            raise ChannelClosed("a message is not the next one")
        self._num_received += 1
        self.last_received = time.monotonic()
        return _parsed(counted[_COUNTER.size :])

    def close(self) -> None:
        """Close the connection, and forget the keys."""
        _open.discard(self)
        self._connection.close()
        self._send_key = self._receive_key = b""


def _probe(connection: socket.socket) -> None:
    """Enable keep-alive in the kernel: a launcher that is importing, or has not started, sends no beats."""
    with suppress(OSError, AttributeError):  # names that exist only on Linux
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_SECONDS // _PROBE_SECONDS - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_SECONDS)


class _Guest:
    """Connection whose other side is not authenticated yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self.frames = Frames(HANDSHAKE_LIMIT_BYTES)
        connection.send(_framed(json.dumps({"nonce": self.nonce}).encode()))

    def advance(self, secret: bytes) -> Channel | None:
        """Read available data; return the channel once the guest is authenticated.

        Raises:
            ChannelClosed: Authentication failed.
            OSError: It is gone.
        """
        data = self.connection.recv(HANDSHAKE_LIMIT_BYTES + _LENGTH.size)
        if not data:
            raise ChannelClosed("it went away")
        self.frames.add(data)
        body = self.frames.take()
        if body is None:
            return None
        reply = _parsed(body)
        nonce, proof = reply.get("nonce"), reply.get("proof")
        if not _is_nonce(nonce) or not isinstance(proof, str) or not proof.isascii():
            raise ChannelClosed("it did not answer the challenge")
        if not hmac.compare_digest(proof, _hash(secret, "client", self.nonce, nonce).hex()):
            raise ChannelClosed("it does not know the secret")
        mine = _hash(secret, "server", self.nonce, nonce).hex()
        self.connection.send(_framed(json.dumps({"proof": mine}).encode()))
        keys = [_hash(secret, way, self.nonce, nonce) for way in ("to client", "to server")]
        return Channel(self.connection, *keys)


class ChannelListener:
    """Listening side: it admits peers that know the secret, and soon drops all others."""

    def __init__(self, family: int, address: Address, secret: bytes) -> None:
        """Listen on one address.

        Raises:
            OSError: It is not an address of this host, or it is in use.
        """
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen(256)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        self._secret = secret
        self._guests: OrderedDict[int, _Guest] = OrderedDict()
        _open.add(self)
        self.num_refused = 0
        """Number of peers that were refused because they did not know the secret."""

    @property
    def address(self) -> Address:
        """Return the address on which it listens."""
        return tuple(self._listener.getsockname())

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors to wait on for new peers and their messages."""
        return [self._listener.fileno(), *self._guests]

    def admit(self, most_seconds: float) -> list[Channel]:
        """Return newly authenticated peers, after at most `most_seconds`; data of others is discarded."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for descriptor in self._guests:
            poll.register(descriptor, select.POLLIN)
        if self._guests:
            most_seconds = min(most_seconds, max(0.0, self._first_deadline() - time.monotonic()))
        ready = {descriptor for descriptor, _ in poll.poll(most_seconds * 1000)}
        known = [channel for channel in map(self._advanced, ready & self._guests.keys()) if channel is not None]
        if self._listener.fileno() in ready:
            self._take_in()
        while self._guests and self._first_deadline() <= time.monotonic():
            self._send_away(next(iter(self._guests)))
        return known

    def _first_deadline(self) -> float:
        return next(iter(self._guests.values())).deadline

    def _take_in(self) -> None:
        for _ in range(MOST_GUESTS):
            try:
                connection, _address = self._listener.accept()
            except OSError:  # no further connection, or no free descriptor
                return
            try:
                self._guests[connection.fileno()] = _Guest(connection)
            except OSError:
                connection.close()
            if len(self._guests) > MOST_GUESTS:
                self._send_away(next(iter(self._guests)))

    def _advanced(self, descriptor: int) -> Channel | None:
        try:
            channel = self._guests[descriptor].advance(self._secret)
        except BlockingIOError:
            return None
        except (ChannelClosed, OSError) as error:
            self.num_refused += isinstance(error, ChannelClosed)
            self._send_away(descriptor)
            return None
        if channel is not None:
            del self._guests[descriptor]
        return channel

    def _send_away(self, descriptor: int) -> None:
        self._guests.pop(descriptor).connection.close()

    def close(self) -> None:
        """Stop listening. Accepted connections are kept."""
        _open.discard(self)
        self._listener.close()
        while self._guests:
            self._send_away(next(iter(self._guests)))
        self._secret = b""


def connect(family: int, address: Address, secret: bytes, *, timeout_seconds: float) -> Channel:
    """Connect to a listener, and authenticate both sides.

    Raises:
        HandshakeRefused: One of the two does not know the secret.
        OSError: No launcher replies at this address within the timeout, which is for the whole handshake.
    """
    connection = socket.socket(family, socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout_seconds
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(address)
        theirs = _asked(connection, deadline).get("nonce")
        if not _is_nonce(theirs):
            raise ChannelClosed("what answers there is no launcher of dure")
        nonce = secrets.token_hex(_NONCE_BYTES)
        proof = _hash(secret, "client", theirs, nonce).hex()
        connection.sendall(_framed(json.dumps({"nonce": nonce, "proof": proof}).encode()))
        try:
            answer = _asked(connection, deadline)
        except OSError as error:
            raise HandshakeRefused("it closed the connection when this node had proved itself") from error
        if not hmac.compare_digest(
            str(answer.get("proof")).encode(), _hash(secret, "server", theirs, nonce).hex().encode()
        ):
            raise HandshakeRefused("it could not prove that it knows the secret")
        keys = [_hash(secret, way, theirs, nonce) for way in ("to server", "to client")]
        return Channel(connection, *keys)
    except BaseException:
        connection.close()
        raise


def _is_nonce(value: object) -> TypeGuard[str]:
    """Return whether a value is one of this protocol's random numbers: nothing else is signed."""
    return isinstance(value, str) and _NONCE.fullmatch(value) is not None


def _asked(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Receive one short message and not a byte more."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if size > HANDSHAKE_LIMIT_BYTES:
        raise ChannelClosed("what answers there is no launcher of dure")
    return _parsed(_exactly(connection, size, deadline))


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:  # single bytes from time to time do not count as a reply
            raise TimeoutError("it does not answer in time")
        connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise ChannelClosed("it closed the connection")
        data += part
    return data
