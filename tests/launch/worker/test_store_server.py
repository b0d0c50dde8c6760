"""The process that serves the store of a script's ranks."""

import os
import socket
from contextlib import closing
from datetime import timedelta

import pytest
import torch.distributed as dist

from dure.launch.worker.store_server import StoreServer
from dure.process.stop_signals import STOP_SIGNALS


@pytest.mark.parametrize("by_fork", [True, False])
def test_store_server_when_its_group_is_signalled_while_it_starts_then_it_serves(by_fork):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with closing(StoreServer(listener, by_fork=by_fork)) as server:
        listener.close()  # now only the process listens: if it is gone, connecting fails at once
        for number in STOP_SIGNALS:
            os.kill(server.pid, number)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        store.set("key", "value")
        assert store.get("key") == b"value"
