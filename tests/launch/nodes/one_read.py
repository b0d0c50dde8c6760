"""Messages to a node that comes, so that it gets them in one read."""

import time
from contextlib import closing, suppress
from unittest.mock import patch

from dure.launch.nodes.channel import ChannelClosed, ChannelListener
from dure.launch.nodes.messages import Message, encode


def answer_together(listener: ChannelListener, *messages: Message, seconds: float = 10.0) -> None:
    """Let one node in and send it all of these messages together; return when it has gone."""
    deadline = time.monotonic() + seconds
    channels = []
    while not channels and time.monotonic() < deadline:
        channels = listener.admit(0.02)
    with closing(channels[0]) as channel:
        with patch.object(channel, "flush"):
            for message in messages:
                channel.send(encode(message))
        channel.flush()
        with suppress(ChannelClosed):
            while time.monotonic() < deadline:
                channel.receive()
                time.sleep(0.005)
