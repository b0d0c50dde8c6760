"""Background thread of a process: it sends requests, receives responses and executes them in rank 0's order."""

import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dure.compat.horovod.engine.collectives import execute
from dure.compat.horovod.engine.control import Channel, Closed, Reception, connect, encoded
from dure.compat.horovod.engine.coordinator import Coordinator, Limits
from dure.compat.horovod.engine.entries import Entry
from dure.compat.horovod.engine.failures import HorovodInternalError
from dure.compat.horovod.engine.requests import GLOBAL_SET, Request, Response
from dure.compat.horovod.engine.timeline import Timeline
from dure.compat.horovod.engine.world import World, wait_for
from dure.documents import parse_json
from dure.errors import PeerLost
from dure.host.environment import on_loopback
from dure.terminal import print_status
from dure.torchcompat.own_groups import OwnGroup

SHUT_DOWN = (
    "Horovod has been shut down: a rank has failed or finished, so that no further collective of all ranks is possible"
)
DUPLICATE = (
    "a collective with the same name is not finished yet: give each tensor a name of its own, or wait for the first"
)
_STALL_CHECK_SECONDS = 1.0
_LONG_WAIT_SECONDS = 3.0
"""Wait after which a rank reports for what it waits: if all ranks do, and none for the same, none can go on."""
_LEAVE_SECONDS = 10.0
_FAREWELL_SECONDS = 2.0


class PeerGone(HorovodInternalError, PeerLost):
    """Failure of a collective because another rank is gone: a consequence, never a first cause."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the engine, from Horovod's variables."""

    limits: Limits = field(default_factory=Limits)
    cycle_seconds: float = 0.001
    """Time for which requests are collected before they are sent, unless something waits (`HOROVOD_CYCLE_TIME`)."""
    cache_capacity: int = 1024
    """Maximum number of requests that are sent as a number after the first time (`HOROVOD_CACHE_CAPACITY`)."""
    start_seconds: float = 600.0
    """Maximum wait for the other ranks at the start (`HOROVOD_START_TIMEOUT`)."""
    timeout_seconds: float = 300.0
    """Maximum time of one collective that all ranks have asked for (`HOROVOD_GLOO_TIMEOUT_SECONDS`)."""


@dataclass(slots=True)
class _Set:
    """Process set, with the groups that it has on this rank."""

    ranks: tuple[int, ...]
    on_cpu: OwnGroup | None = None
    on_devices: OwnGroup | None = None


class Engine:
    """Collectives of this process, from the start of Horovod to its shutdown."""

    def __init__(self, world: World, settings: Settings, generation: int) -> None:
        """Meet the other ranks, and start the thread.

        Args:
            world: Position of this process.
            settings: Settings.
            generation: Number of this start, the same on all ranks.

        Raises:
            HorovodInternalError: The other ranks have not come in time.
        """
        self.world = world
        self.places: list[dict[str, Any]] = []
        """Host, local rank and number of local ranks of every rank."""
        self._settings = settings
        self._store = None if world.store is None else dist.PrefixStore(str(generation), world.store)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._wake_lock = threading.Lock()
        self._pending: dict[tuple[int, str], Entry] = {}
        self._outbox: list[Request] = []
        self._outbox_since = 0.0
        self._is_urgent = False
        self._own_wait: tuple[int, str] | None = None
        self._known: dict[Request, int] = {}
        self._closed: BaseException | None = None
        self._has_left = False
        self._timeline: Timeline | None = None
        self._peers: dict[int, Channel] = {}
        self._requests_of: dict[int, dict[int, Request]] = {}
        self._channel: Channel | None = None
        self._coordinator: Coordinator | None = None
        try:
            self._meet()
            self._sets = {GLOBAL_SET: _Set(tuple(range(world.size)))}
            self._sets[GLOBAL_SET].on_cpu = self._open_group(GLOBAL_SET, "gloo")
        except (TimeoutError, OSError, Closed, dist.DistError) as error:
            self._close_channels()
            raise PeerGone(f"the {world.size} ranks did not meet: {error}") from None
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="horovod", daemon=True)
        self._thread.start()

    # --- called by the threads of the script

    def enqueue(self, entry: Entry) -> None:
        """Ask for a collective.

        Raises:
            ValueError: One of the same name is in flight.
            HorovodInternalError: The engine is shut down.
        """
        request = entry.request
        key = request.process_set, request.name
        with self._lock:
            if self._closed is not None:
                raise type(self._closed)(*self._closed.args)
            if key in self._pending:
                raise ValueError(f"{request.name}: {DUPLICATE}")
            self._pending[key] = entry
            is_first = not self._outbox
            if is_first:
                self._outbox_since = time.monotonic()
            self._outbox.append(request)
        if is_first:
            self._wake()

    def wait(self, entry: Entry) -> None:
        """Wait for a collective; requests that have been collected are sent at once."""
        if not entry.is_done:
            self.flush()
            if not entry.wait(_LONG_WAIT_SECONDS):
                self._report_wait(entry)
                entry.wait()

    def _report_wait(self, entry: Entry) -> None:
        """Let rank 0 know that this rank does nothing else than wait."""
        key = entry.request.process_set, entry.request.name
        if threading.current_thread() is not threading.main_thread() or entry.request.kind == "join":
            return
        if self._channel is None:
            self._own_wait = key
            self._wake()
        else:
            with suppress(OSError), self._send_lock:
                self._channel.send({"waits": key})

    def flush(self) -> None:
        """Send the requests that have been collected."""
        if not self._outbox:
            return
        if self._channel is None:
            self._is_urgent = True
            self._wake()
        else:
            with suppress(OSError):  # the thread notices it
                self._send_outbox()

    def members_of(self, process_set: int) -> tuple[int, ...] | None:
        """Return the ranks of a process set; None if there is none of that number."""
        found = self._sets.get(process_set)
        return None if found is None else found.ranks

    @property
    def is_open(self) -> bool:
        """Return whether collectives are possible."""
        return self._closed is None

    def start_timeline(self, path: str, *, marks_cycles: bool) -> None:
        """Record a timeline; only rank 0 does."""
        if self._coordinator is None:
            return
        self.stop_timeline()
        timeline = Timeline(path, marks_cycles=marks_cycles)
        self._timeline = timeline
        self._coordinator.on_event = timeline.negotiation

    def stop_timeline(self) -> None:
        """Complete the timeline, if there is one."""
        timeline, self._timeline = self._timeline, None
        if self._coordinator is not None:
            self._coordinator.on_event = None
        if timeline is not None:
            timeline.close()

    def shutdown(self) -> None:
        """Leave: every rank's collectives end. Returns when this process's thread has ended."""
        self._has_left = True
        if self._thread.is_alive():
            if self._channel is not None:
                with suppress(OSError), self._send_lock:
                    self._channel.send({"leave": True})
            self._wake()
            self._thread.join(_LEAVE_SECONDS)
        self.stop_timeline()

    def forget(self) -> None:
        """Close what a forked process has inherited: the other ranks would not see the end of this one."""
        self._lock = threading.Lock()  # another thread may have held it
        self._closed = HorovodInternalError("a forked process has no Horovod of its own: call hvd.init() there")
        self._close_channels()
        with suppress(OSError):
            os.close(self._wake_descriptor)

    # --- start

    def _meet(self) -> None:
        world, settings = self.world, self._settings
        place: dict[str, Any] = {
            "host": socket.gethostname(),
            "node": world.place.node_rank,
            "local_rank": world.place.local_rank,
            "local_size": world.place.local_world_size,
        }
        if world.size == 1:
            self.places = [place]
            self._coordinator = Coordinator([place["host"]], settings.limits)
            return
        assert self._store is not None
        if world.rank == 0:
            reception = Reception(world.host)
            try:
                host, port = reception.address
                self._store.set("rank 0", f'["{host}", {port}, "{reception.token}"]')
                admitted = reception.admit(world.size, settings.start_seconds)
            finally:
                reception.close()
            self._peers = {rank: channel for rank, (channel, _) in admitted.items()}
            self._requests_of = {rank: {} for rank in self._peers}
            self.places = [place, *(admitted[rank][1]["place"] for rank in range(1, world.size))]
            for channel in self._peers.values():
                channel.send({"places": self.places})
            self._coordinator = Coordinator([str(each["host"]) for each in self.places], settings.limits)
        else:
            host, port, token = parse_json(wait_for(self._store, "rank 0", settings.start_seconds))
            hello = {"rank": world.rank, "token": token, "place": place}
            self._channel, reply = connect(str(host), int(port), hello, settings.start_seconds)
            self.places = list(reply["places"])

    def _open_group(self, process_set: int, backend: str) -> OwnGroup | None:
        ranks = self._sets[process_set].ranks
        if len(ranks) == 1 or self._store is None:
            return None
        store = dist.PrefixStore(f"{backend} {process_set}", self._store)
        with on_loopback("GLOO_SOCKET_IFNAME") if self.world.is_one_host else nullcontext():
            rank = ranks.index(self.world.rank)
            return OwnGroup(backend, store, rank, len(ranks), self._settings.timeout_seconds)

    # --- the thread

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_descriptor >= 0:
                os.eventfd_write(self._wake_descriptor, 1)

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            if self._channel is None:
                self._coordinate()
            else:
                self._follow(self._channel)
        except BaseException as error:
            self._close(error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error)))
        finally:
            self._close(PeerGone(SHUT_DOWN))
            self._close_channels()
            with self._wake_lock:
                os.close(self._wake_descriptor)
                self._wake_descriptor = -1

    def _follow(self, channel: Channel) -> None:
        """Execute rank 0's responses until it ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            selector.register(self._wake_descriptor, selectors.EVENT_READ)
            messages: Iterable[Any] = channel.received()
            while True:
                for message in messages:
                    if self._closes(message):
                        return
                    for values in message["responses"]:
                        self._execute(Response.from_json(values))
                messages = ()
                for key, _ in selector.select(self._seconds_to_cycle()):
                    if key.fd == self._wake_descriptor:
                        self._clear_wake()
                    else:
                        try:
                            messages = channel.receive()
                        except Closed as error:
                            if self._has_left:
                                return
                            raise PeerGone(f"rank 0 is gone: {error}") from None
                if self._outbox and self._seconds_to_cycle() == 0:
                    try:
                        self._send_outbox()
                    except OSError as error:
                        raise PeerGone(f"rank 0 is gone: {error.strerror}") from None

    def _closes(self, message: Any) -> bool:
        """Return whether a message of rank 0 ends the collectives, and raise the error if they have failed."""
        if "failed" in message:
            kind = PeerGone if message.get("is_loss") else HorovodInternalError
            raise kind(str(message["failed"]))
        return "leave" in message

    def _seconds_to_cycle(self) -> float | None:
        """Return the time until collected requests are sent; None if there are none."""
        if not self._outbox:
            return None
        return max(0.0, self._outbox_since + self._settings.cycle_seconds - time.monotonic())

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_descriptor)

    def _send_outbox(self) -> None:
        assert self._channel is not None
        with self._send_lock:
            with self._lock:
                requests, self._outbox = self._outbox, []
            if requests:
                self._channel.send({"requests": [self._numbered(request) for request in requests]})

    def _numbered(self, request: Request) -> Any:
        """Return a request for sending: its number, if rank 0 knows it from an earlier time."""
        number = self._known.get(request)
        if number is not None:
            return number
        if ".noname." in request.name or len(self._known) >= self._settings.cache_capacity:
            return request.to_json()
        self._known[request] = len(self._known)
        return [self._known[request], request.to_json()]

    def _coordinate(self) -> None:
        """Match the requests of all ranks, and execute what is complete."""
        coordinator = self._coordinator
        assert coordinator is not None
        next_check = time.monotonic() + _STALL_CHECK_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_descriptor, selectors.EVENT_READ)
            for rank, channel in self._peers.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while True:
                seconds = None
                if self._outbox or coordinator.is_waiting:
                    check = max(0.0, next_check - time.monotonic())
                    cycle = self._seconds_to_cycle()
                    seconds = check if cycle is None or self.world.size == 1 else min(check, cycle)
                is_leaving = False
                for key, _ in selector.select(seconds):
                    if key.data is None:
                        self._clear_wake()
                    else:
                        is_leaving |= self._read_requests(key.data, coordinator)
                if self._timeline is not None:
                    self._timeline.mark_cycle()
                self._add_own(coordinator)
                self._start(coordinator.take())
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _STALL_CHECK_SECONDS
                    self._check_stalls(coordinator)
                    coordinator.fail_if_none_can_go_on()
                    self._start(coordinator.take())
                if is_leaving or self._has_left:
                    self._send_to_all({"leave": True})
                    for channel in self._peers.values():
                        channel.finish(_FAREWELL_SECONDS)
                    return

    def _add_own(self, coordinator: Coordinator) -> None:
        with self._lock:
            requests, self._outbox, self._is_urgent = self._outbox, [], False
        for request in requests:
            coordinator.add(0, request)
        own_wait, self._own_wait = self._own_wait, None
        if own_wait is not None:
            coordinator.note_wait(0, own_wait)

    def _read_requests(self, rank: int, coordinator: Coordinator) -> bool:
        """Note the requests that a rank has sent; return whether it leaves."""
        known = self._requests_of[rank]
        try:
            for message in self._peers[rank].receive():
                if "leave" in message:
                    return True
                if "waits" in message:
                    process_set, name = message["waits"]
                    coordinator.note_wait(rank, (int(process_set), str(name)))
                    continue
                for values in message["requests"]:
                    if isinstance(values, int):
                        request = known[values]
                    elif isinstance(values[0], int):
                        request = known[values[0]] = Request.from_json(values[1])
                    else:
                        request = Request.from_json(values)
                    coordinator.add(rank, request)
        except (Closed, ValueError, KeyError, TypeError) as error:
            self._fail(f"rank {rank} is gone: {error}", is_loss=True)
        return False

    def _start(self, responses: list[Response]) -> None:
        if not responses:
            return
        if self._peers:
            self._send_responses(responses)
        for response in responses:
            if self._concerns(0, response):
                self._execute(response)

    def _send_responses(self, responses: list[Response]) -> None:
        """Send responses to the ranks that they concern."""
        data: dict[tuple[int, ...], bytes] = {}
        for rank, channel in self._peers.items():
            own = tuple(index for index, response in enumerate(responses) if self._concerns(rank, response))
            if not own:
                continue
            if own not in data:
                data[own] = encoded({"responses": [responses[index].to_json() for index in own]})
            try:
                channel.send_bytes(data[own])
            except OSError as error:
                self._fail(f"rank {rank} is gone: {error.strerror}", is_loss=True)

    def _concerns(self, rank: int, response: Response) -> bool:
        found = self._sets.get(response.process_set)
        return found is None or rank in found.ranks

    def _send_to_all(self, message: Any) -> None:
        for channel in self._peers.values():
            with suppress(OSError):
                channel.send(message)

    def _fail(self, reason: str, *, is_loss: bool) -> None:
        self._send_to_all({"failed": reason, "is_loss": is_loss})
        raise PeerGone(reason) if is_loss else HorovodInternalError(reason)

    def _check_stalls(self, coordinator: Coordinator) -> None:
        lines, reason = coordinator.stalled(time.monotonic())
        if lines:
            seconds = self._settings.limits.stall_seconds
            print_status(
                f"one or more tensors were submitted to be reduced, gathered or broadcast by some ranks, and wait for "
                f"the others for more than {seconds:g} seconds: see what those ranks do instead\n" + "\n".join(lines)
            )
        if reason is not None:
            self._fail(reason, is_loss=False)

    def _execute(self, response: Response) -> None:
        """Execute one response on this rank."""
        with self._lock:
            keys = [(response.process_set, name) for name in response.names]
            entries = [self._pending.pop(key, None) for key in keys]
        if response.kind == "join":
            self._finish_join(response)
            return
        if response.error is not None:
            _finish(entries, HorovodInternalError(response.error))
            return
        if response.kind in ("add_process_set", "remove_process_set"):
            self._change_sets(response, entries)
            return
        if not response.models and any(entry is None for entry in entries):
            if response.kind == "barrier":
                return  # this rank has joined
            raise HorovodInternalError(f"rank 0 started {response.names[0]}, which this rank has not asked for")
        timeline = self._timeline
        activity = "GLOO_" + response.kind.upper()
        if timeline is not None:
            timeline.begin(_described(entries), response.kind, activity)
        try:
            self._execute_on_device(response, entries)
        except Exception as error:
            failure = PeerGone(str(error)) if isinstance(error, RuntimeError) else HorovodInternalError(repr(error))
            _finish(entries, failure)
            if self._coordinator is not None:
                self._send_to_all({"failed": f"rank 0: {error}", "is_loss": True})
            raise failure from error
        if timeline is not None:
            timeline.end([*response.names], response.kind, activity)
        _finish(entries, None)

    def _execute_on_device(self, response: Response, entries: Sequence[Entry | None]) -> None:
        members = self._sets[response.process_set]
        tensor = next((each for entry in entries if entry is not None for each in entry.inputs), None)
        if tensor is None or tensor.device.type == "cpu":
            execute(response, entries, members.on_cpu, members.ranks, moves_to_host=True)
            return
        module: Any = torch.get_device_module(tensor.device)
        with module.device(tensor.device):
            stream = module.current_stream()
            for entry in entries:
                if entry is not None and entry.ready is not None:
                    stream.wait_event(entry.ready)
            group, moves_to_host = members.on_cpu, True
            if response.has_own_devices and dist.is_nccl_available():
                if members.on_devices is None:
                    members.on_devices = self._open_group(response.process_set, "nccl")
                group, moves_to_host = members.on_devices, False
            execute(response, entries, group, members.ranks, moves_to_host=moves_to_host)
            stream.synchronize()

    def _finish_join(self, response: Response) -> None:
        with self._lock:
            entry = next((each for each in self._pending.values() if each.request.kind == "join"), None)
            if entry is not None:
                del self._pending[entry.request.process_set, entry.request.name]
        if entry is not None:
            entry.value = response.value
            entry.finish()

    def _change_sets(self, response: Response, entries: Sequence[Entry | None]) -> None:
        number = response.value
        if number >= 0 and response.kind == "add_process_set":
            self._sets[number] = _Set(response.members)
            if self.world.rank in response.members:
                self._sets[number].on_cpu = self._open_group(number, "gloo")
        elif number >= 0:
            self._sets.pop(number, None)
            with self._lock:
                gone = [key for key in self._pending if key[0] == number]
                lost = [self._pending.pop(key) for key in gone]
            _finish(lost, HorovodInternalError(f"process set {number} was removed"))
        for entry in entries:
            if entry is not None:
                entry.value = number
        _finish(entries, None)

    def _close(self, error: BaseException) -> None:
        with self._lock:
            if self._closed is None:
                self._closed = error
            pending = [*self._pending.values()]
            self._pending.clear()
            self._outbox.clear()
        for entry in pending:
            entry.finish(error)

    def _close_channels(self) -> None:
        for channel in [*self._peers.values(), *([self._channel] if self._channel else [])]:
            channel.close()


def _finish(entries: Sequence[Entry | None], error: BaseException | None) -> None:
    for entry in entries:
        if entry is not None:
            entry.finish(error)


def _described(entries: Sequence[Entry | None]) -> list[tuple[str, str, str]]:
    """Return name, types and shapes of each entry, for the timeline."""
    requests = [entry.request for entry in entries if entry is not None]
    return [(each.name, ", ".join(each.dtypes), ", ".join(map(str, map(list, each.shapes)))) for each in requests]
