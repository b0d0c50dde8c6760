"""States that are committed and restored, and the loop that goes on after a failed collective."""

import functools
import queue
from collections.abc import Callable, Iterable
from typing import Any

from dure.compat.horovod.engine.failures import HorovodInternalError, HostsUpdatedInterrupt

NO_UPDATE, ADDED, REMOVED, MIXED = 0, 1, 2, 3
"""Changes of hosts, by Horovod's numbers."""


class State:
    """State of a training that all ranks share."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        """Begin without callbacks.

        Args:
            bcast_object: Returns rank 0's object on all ranks.
            get_rank: Returns the rank of this process.
        """
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions that are called after Horovod was started again, such as to scale the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepare for the ranks of a new start."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note a change of hosts, to which all ranks react at their next commit."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep the state, and react to changes of hosts.

        Raises:
            HostsUpdatedInterrupt: The hosts have changed.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """React to changes of hosts that rank 0 knows of.

        Raises:
            HostsUpdatedInterrupt: The hosts have changed.
        """
        before = last = self._last_updated_timestamp
        update = NO_UPDATE
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > last:
                last = timestamp
                update |= change
        before, self._last_updated_timestamp, update = self._bcast_object((before, last, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == REMOVED)

    def save(self) -> None:
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state that was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for the ranks of a new start, before the synchronisation."""


class ObjectState(State):
    """State of Python objects, which are attributes."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        """Keep the objects as attributes.

        Args:
            bcast_object: Returns rank 0's object on all ranks.
            get_rank: Returns the rank of this process.
            kwargs: Objects by their names.
        """
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        """Keep the objects."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Return to the objects that were kept last."""
        self._set_attrs()

    def sync(self) -> None:
        """Give all ranks the objects of rank 0."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that starts `func` again after a failed collective or a change of hosts.

    Args:
        func: Function of a state and further arguments.
        reset: Starts Horovod again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper
