"""Stores at which ranks meet."""

import socket
import sys

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dure.torchcompat.stores import meet_at_served_store, store_at, store_on_socket
from tests.torchcompat.conftest import TIMEOUT


def test_served_store_when_a_group_follows_another_then_it_finds_nothing_of_it(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = listener.getsockname()
    server = store_on_socket(listener, TIMEOUT)
    for module, name in (
        (sys.modules["torch.distributed.rendezvous"], "_create_c10d_store"),
        (c10d, "_update_default_pg"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # to be restored
    meet_at_served_store(host, port)
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=0, world_size=1, timeout=TIMEOUT)
        found.append(c10d._get_default_store().add("key", 1))
        dist.destroy_process_group()
    assert found == [1, 1]
    assert server is not None


def test_store_when_served_on_a_socket_then_it_answers_at_that_address_only(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    store = store_on_socket(listener, TIMEOUT)
    client = store_at(host, port, TIMEOUT)
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert listener.fileno() == -1, "the store owns the descriptor"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)
