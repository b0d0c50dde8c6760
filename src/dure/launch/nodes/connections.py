"""Connections of one launcher to others: sending, waiting, closing; a subclass handles lost nodes."""

import select
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from dure.launch.nodes.channel import Channel, ChannelClosed
from dure.launch.nodes.messages import Message, encode

QUIET_SECONDS = 2.5
"""Seconds of silence of a node after which it may be the cause of waiting ranks."""
_FLUSH_SECONDS = 5.0


class Links(ABC):
    """Connections by node rank."""

    def __init__(self, channels: dict[int, Channel]) -> None:
        self._channels = channels

    @abstractmethod
    def _lose(self, rank: int, why: str) -> None:
        """Handle the loss of a node."""

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors to wait on for messages of the others."""
        return [channel.fileno() for channel in self._channels.values()]

    @property
    def is_one_quiet(self) -> bool:
        """Return whether a node has been silent for longer than it should."""
        now = time.monotonic()
        return any(now - channel.last_received > QUIET_SECONDS for channel in self._channels.values())

    def send(self, rank: int, message: Message) -> None:
        """Send to one node; a message that is too long is not sent."""
        if rank not in self._channels:
            return
        try:
            with suppress(ValueError):
                self._channels[rank].send(encode(message))
        except ChannelClosed as error:
            self._lose(rank, str(error))

    def send_to_all(self, message: Message, but: int | None = None) -> None:
        """Send to all nodes that this one has a connection with."""
        for rank in [rank for rank in self._channels if rank != but]:
            self.send(rank, message)

    def sleep(self, most_seconds: float) -> None:
        """Wait until data arrives, at most `most_seconds`."""
        poll = select.poll()
        for descriptor in self.descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(most_seconds * 1000)

    def close(self) -> None:
        """Send remaining data, and close all connections."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while any(channel.has_unsent for channel in self._channels.values()) and time.monotonic() < deadline:
            for rank, channel in list(self._channels.items()):
                try:
                    channel.flush()
                except ChannelClosed:
                    del self._channels[rank]
            time.sleep(0.01)
        self.drop_all()

    def drop_all(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
