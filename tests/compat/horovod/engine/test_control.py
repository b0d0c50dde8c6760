"""Connections of the ranks: who is admitted, and what is read."""

import socket
import struct
import threading

import pytest

from dure.compat.horovod.engine.control import Channel, Closed, Reception, connect


def test_reception_when_strangers_come_then_only_the_rank_with_the_token_is_admitted() -> None:
    reception = Reception("127.0.0.1")
    host, port = reception.address
    strangers = [socket.create_connection((host, port)) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    Channel(strangers[1]).send({"rank": 1, "token": "guessed"})

    def join() -> None:
        channel, reply = connect(host, port, {"rank": 1, "token": reception.token}, 5.0)
        replies.append(reply)
        channel.close()

    replies: list[object] = []
    rank = threading.Thread(target=join)
    rank.start()
    admitted = reception.admit(2, 10.0)
    channel, hello = admitted[1]
    channel.send({"places": []})
    rank.join()
    assert (hello["rank"], replies) == (1, [{"places": []}])
    for connection in (*strangers, channel, reception):
        connection.close()


def test_reception_when_a_rank_is_missing_then_it_is_named() -> None:
    reception = Reception("127.0.0.1")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\]"):
        reception.admit(3, 0.01)
    reception.close()


def test_channel_when_a_message_is_too_long_then_it_is_not_read() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver = Channel(listener.accept()[0])
    sender.sendall(struct.pack("!I", 2**31))
    with pytest.raises(Closed, match="over the limit"):
        list(receiver.receive())
    sender.close()
    with pytest.raises(Closed, match=r"closed|reset"):
        list(receiver.receive())
    for connection in (listener, receiver):
        connection.close()
