"""Process group of one rank."""

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from dure.torchcompat.imports import import_late_parts
from dure.torchcompat.stores import store_on_socket

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


@pytest.fixture
def solo_group(listener: socket.socket) -> Iterator[None]:
    import_late_parts()
    store = store_on_socket(listener, TIMEOUT)
    dist.init_process_group("gloo", store=dist.PrefixStore("test", store), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()
