"""The channel between launchers: who gets in, what a stranger can do, what a changed message does."""

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from dure.launch.nodes.channel import (
    HANDSHAKE_SECONDS,
    MESSAGE_LIMIT_BYTES,
    MOST_GUESTS,
    Channel,
    ChannelClosed,
    ChannelListener,
    Frames,
    HandshakeRefused,
    _hash,
    connect,
)
from tests.commands import wait_until

SECRET = b"a secret of thirty-two characters"
KEYS = b"1" * 32, b"2" * 32


@pytest.fixture
def listener() -> Iterator[ChannelListener]:
    with closing(ChannelListener(socket.AF_INET, ("127.0.0.1", 0), SECRET)) as listener:
        yield listener


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    server.close()
    with closing(Channel(one, *KEYS)) as a, closing(Channel(other, *reversed(KEYS))) as b:
        yield a, b


def admitted(listener: ChannelListener, seconds: float = 5.0) -> list[Channel]:
    deadline = time.monotonic() + seconds
    while not (channels := listener.admit(0.05)) and time.monotonic() < deadline:
        pass
    return channels


def received(channel: Channel) -> list[dict]:
    deadline = time.monotonic() + 5
    while not (messages := channel.receive()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return messages


def connected(listener: ChannelListener, secret: bytes = SECRET) -> Channel:
    return connect(socket.AF_INET, listener.address, secret, timeout_seconds=5)


def saying(message: dict) -> bytes:
    body = json.dumps(message).encode()
    return framed(body)


def challenged(listener: ChannelListener) -> tuple[socket.socket, str]:
    """Connect as a stranger; return the connection, and the challenge that came."""
    connection = socket.create_connection(listener.address, timeout=5)
    (size,) = struct.unpack(">I", connection.recv(4))
    return connection, json.loads(connection.recv(size))["nonce"]


def proof_of(*parts: str) -> str:
    return _hash(SECRET, *parts).hex()


def is_closed(connection: socket.socket) -> bool:
    with suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


@pytest.fixture
def serving(listener: ChannelListener) -> Iterator[list[Channel]]:
    """Admit peers all the time; the channels of those who came in."""
    known: list[Channel] = []
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            known.extend(listener.admit(0.02))

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        yield known
        is_over.set()
        served.result()
    for channel in known:
        channel.close()


def test_channel_when_both_know_the_secret_then_messages_come_in_order(listener):
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connected, listener)
        (inside,) = admitted(listener)
        with closing(connecting.result()) as outside, closing(inside):
            for number in range(3):
                outside.send({"number": number})
            inside.send({"text": "ünïcode\n" * 1000})
            assert received(outside) == [{"text": "ünïcode\n" * 1000}]
            assert received(inside) == [{"number": 0}, {"number": 1}, {"number": 2}]


@pytest.mark.alone
def test_guest_when_its_secret_is_another_then_it_is_sent_away_at_once(listener, serving):
    began = time.monotonic()
    with pytest.raises(HandshakeRefused, match="closed the connection when this node had proved itself"):
        connected(listener, b"another secret of that length ...")
    assert time.monotonic() - began < 0.5
    assert (serving, listener.num_refused) == ([], 1)


def test_server_when_it_does_not_know_the_secret_then_the_client_does_not_talk_to_it():
    with closing(ChannelListener(socket.AF_INET, ("127.0.0.1", 0), SECRET)) as impostor, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = impostor._listener.accept()
            with connection:
                connection.sendall(saying({"nonce": "0" * 32}))
                connection.recv(4096)
                connection.sendall(saying({"proof": "00"}))

        impostor._listener.setblocking(True)
        answering = pool.submit(answer)
        with pytest.raises(HandshakeRefused, match="could not prove that it knows the secret"):
            connected(impostor)
        answering.result()


@pytest.mark.alone
def test_guest_when_it_says_nothing_then_it_is_dropped_within_a_second(listener, serving):
    with socket.create_connection(listener.address) as idle:
        began = time.monotonic()
        assert is_closed(idle)
        assert time.monotonic() - began < HANDSHAKE_SECONDS + 0.3


@pytest.mark.alone
def test_listener_when_a_thousand_connections_idle_then_few_are_kept_and_who_knows_the_secret_comes_in(
    listener, serving
):
    crowd = [socket.create_connection(listener.address) for _ in range(500)]
    with closing(connected(listener)) as outside:
        crowd += [socket.create_connection(listener.address) for _ in range(500)]
        assert len(listener.descriptors) <= 1 + MOST_GUESTS + 1
        outside.send({"kind": "here"})
        wait_until(lambda: serving, "the one that knows the secret is in")
        assert received(serving[0]) == [{"kind": "here"}]
    began = time.monotonic()
    assert all(is_closed(connection) for connection in crowd)
    assert time.monotonic() - began < HANDSHAKE_SECONDS + 1
    assert len(listener.descriptors) == 1
    for connection in crowd:
        connection.close()


def test_listener_when_ten_thousand_random_messages_come_then_none_is_let_in(listener, serving):
    chance = random.Random(0)
    made = [lambda: chance.randbytes(chance.randint(1, 600)), lambda: framed(chance.randbytes(chance.randint(0, 500)))]
    made += [lambda: framed(json.dumps(random_json(chance)).encode()[:500])]
    for number in range(1000):
        with socket.create_connection(listener.address) as connection, suppress(ConnectionError):
            for _ in range(10):
                connection.sendall(made[number % 3]())
    with closing(connected(listener)):  # it knows that it is in before the listener's own thread has said so
        wait_until(lambda: serving, "the one that knows the secret is in")
    assert len(serving) == 1


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def random_json(chance: random.Random) -> object:
    values: list[Callable[[], object]] = [
        lambda: None,
        lambda: chance.getrandbits(64),
        lambda: "ÿ" * chance.randint(0, 40),
        lambda: [[]] * 3,
    ]
    return {chance.choice(["nonce", "proof", "x"]): chance.choice(values)() for _ in range(3)}


def test_channel_when_ten_thousand_messages_are_changed_then_each_closes_it(pair):
    sender, receiver = pair
    sender.send({"kind": "signal", "number": 15})
    time.sleep(0.01)
    frame = receiver._connection.recv(4096)
    chance = random.Random(0)
    for _ in range(10_000):
        changed = bytearray(frame)
        changed[chance.randrange(4, len(frame))] ^= chance.randint(1, 255)
        receiver._frames = Frames(receiver._frames.limit)
        receiver._frames.add(bytes(changed))
        with pytest.raises(ChannelClosed, match="a message has a wrong signature"):
            receiver._taken()


def test_channel_when_a_message_is_repeated_or_left_out_then_it_closes(pair):
    sender, receiver = pair
    sender.send({"number": 0})
    time.sleep(0.01)
    frame = receiver._connection.recv(4096)
    for again in (frame, frame):
        receiver._frames.add(again)
    with pytest.raises(ChannelClosed, match="a message is not the next one"):
        receiver._taken()


def test_channel_when_a_message_is_sent_back_then_it_closes(pair):
    sender, receiver = pair
    sender.send({"number": 0})
    time.sleep(0.01)
    sender._frames.add(receiver._connection.recv(4096))
    with pytest.raises(ChannelClosed, match="a message has a wrong signature"):
        sender._taken()


def test_frames_when_a_length_is_over_the_limit_then_nothing_is_kept():
    frames = Frames(MESSAGE_LIMIT_BYTES)
    frames.add(struct.pack(">I", 2**31))
    with pytest.raises(ChannelClosed, match="a message of 2147483648 bytes is over the limit of 65536"):
        frames.take()


def test_message_when_it_is_too_long_then_it_is_not_sent(pair):
    with pytest.raises(ValueError, match="over the limit of 65536"):
        pair[0].send({"text": "x" * MESSAGE_LIMIT_BYTES})


def test_channel_when_the_peer_leaves_then_what_it_said_before_is_heard(pair):
    sender, receiver = pair
    sender.send({"number": 0})
    sender.close()
    assert received(receiver) == [{"number": 0}]
    with pytest.raises(ChannelClosed, match="it closed the connection"):
        received(receiver)


def test_channel_when_one_message_is_asked_for_then_those_that_came_with_it_stay(pair):
    sender, receiver = pair
    for number in range(3):
        sender.send({"number": number})
    sender.close()
    assert [receiver.receive_one() for _ in range(2)] == [{"number": 0}, {"number": 1}]
    assert receiver.receive() == [{"number": 2}]
    with pytest.raises(ChannelClosed, match="it closed the connection"):
        receiver.receive_one()


def test_handshake_when_it_is_replayed_or_reflected_then_nobody_comes_in(listener, serving):
    first, challenge = challenged(listener)
    nonce = "ab" * 16
    said = saying({"nonce": nonce, "proof": proof_of("client", challenge, nonce)})
    first.sendall(said)
    wait_until(lambda: serving, "the one who knows the secret")
    server_proof = json.loads(first.recv(4096)[4:])["proof"]
    later = [challenged(listener) for _ in range(3)]
    for (connection, another), proof in zip(
        later, (None, server_proof, proof_of("server", later[2][1], nonce)), strict=True
    ):
        assert another != challenge
        connection.sendall(said if proof is None else saying({"nonce": nonce, "proof": proof}))
        assert is_closed(connection)
        connection.close()
    assert len(serving) == 1
    assert listener.num_refused == 3
    first.close()


@pytest.mark.parametrize("nonce", ["", "ab|cd", "AB" * 16, "ab" * 15, "ab" * 100, None, 3, ["ab" * 16]], ids=str)
def test_handshake_when_the_random_number_is_none_then_both_sides_refuse_it(listener, serving, nonce):
    connection, challenge = challenged(listener)
    connection.sendall(saying({"nonce": nonce, "proof": proof_of("client", challenge, str(nonce))}))
    assert is_closed(connection)
    connection.close()
    assert serving == []
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, socket.AF_INET, server.getsockname(), SECRET, timeout_seconds=5)
        with server.accept()[0] as connection:
            connection.sendall(saying({"nonce": nonce}))
            with pytest.raises(ChannelClosed, match="is no launcher of dure"):
                connecting.result()


def test_handshake_when_its_steps_come_in_another_order_or_twice_then_nobody_comes_in(listener, serving):
    hasty = socket.create_connection(listener.address, timeout=5)
    hasty.sendall(saying({"nonce": "ab" * 16}) + saying({"proof": "00"}))
    twice, challenge = challenged(listener)
    twice.sendall(saying({"proof": proof_of("client", challenge, "ab" * 16)}))
    twice.sendall(saying({"nonce": "ab" * 16}))
    assert is_closed(hasty)
    assert is_closed(twice)
    hasty.close()
    twice.close()
    assert serving == []


@pytest.mark.alone
def test_knock_when_what_answers_sends_a_byte_now_and_then_then_it_gives_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        connecting = pool.submit(connect, socket.AF_INET, server.getsockname(), SECRET, timeout_seconds=0.5)
        with server.accept()[0] as connection:
            for byte in saying({"nonce": "ab" * 16, "more": "x" * 300}):
                with suppress(OSError):
                    connection.sendall(bytes([byte]))
                time.sleep(0.05)
                if connecting.done():
                    break
            with pytest.raises(OSError, match=r"does not answer in time|timed out"):
                connecting.result()
        assert time.monotonic() - began < 2


def test_channel_when_two_messages_change_places_then_it_closes(pair):
    sender, receiver = pair
    frames = []
    for number in range(2):
        sender.send({"number": number})
        time.sleep(0.01)
        frames.append(receiver._connection.recv(4096))
    receiver._frames.add(frames[1] + frames[0])
    with pytest.raises(ChannelClosed, match="a message is not the next one"):
        receiver._taken()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has such a limit")
def test_connection_when_the_other_host_is_gone_then_the_kernel_notices_whatever_the_launcher_does(pair):
    for channel in pair:
        connection = channel._connection
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
