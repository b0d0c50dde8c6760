"""Loader from data indices to batches on a device, the same on any number of ranks and loader workers."""

import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dure.data import TensorData
from dure.data.randomness import GeneratorStates, at_epoch, kept_global_randomness, seed_for_batch, seed_for_sample
from dure.errors import DataInvalid
from dure.host.device_kinds import copies_beside
from dure.process.parent_death import die_with_parent
from dure.process.stop_signals import STOP_SIGNALS
from dure.strategies.contract.batches import map_tensors, to_device
from dure.strategies.sections.absent_tensors import guarded
from dure.strategies.state.containers import tensors_in
from dure.terminal import few
from dure.training.session.collate_state import CollateChanges, CollateState
from dure.training.session.loader_deaths import LOADER_DEATHS
from dure.training.session.odd_samples import odd_samples
from dure.training.task.task import Task

_PROBED_FETCHES = 8
_MOST_NAMED = 64


class FetchRequest(NamedTuple):
    """Samples to fetch as one batch; passed from the sampler to a loader worker."""

    epoch: int
    indices: np.ndarray
    """Data indices `(B,)`."""


def check_dataset(data: Any, source: str) -> None:
    """Refuse data on which no run can be defined.

    Raises:
        DataInvalid: The data are iterable-style, have no length or no sample 0, or are empty.
    """
    kind = type(data).__name__
    if isinstance(data, IterableDataset):
        raise DataInvalid(
            f"{source} returned {kind}, an IterableDataset: a stream has no sample indices, so its order cannot be "
            "kept the same at another number of ranks; give a map-style dataset (__len__ and __getitem__)"
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataInvalid(f"{source} returned {kind}: give a map-style dataset (__len__ and __getitem__)")
    if isinstance(data, Mapping) and data and 0 not in data:
        raise DataInvalid(
            f"{source} returned {kind}, whose keys are no sample numbers: give one map-style dataset, such as "
            "torch.utils.data.TensorDataset(x, y) or one of its splits"
        )
    if len(data) == 0:
        raise DataInvalid(
            f"{source} returned an empty dataset ({kind}): there is nothing to use; check its path or filter"
        )


class SampleFetch(Dataset[Any]):
    """Fetcher of batches in which the draws for a sample depend only on (seed, epoch, sample index).

    The draws of `collate` depend on the seed, the epoch and the samples of the batch. They do not depend on loader
    processes, restarts or earlier draws, but they do depend on how the global batch is divided.

    A data set with a batched `__getitems__` is called once per batch. The first fetches, and every fetch whose number
    is a power of two, check such a call for draws from the global generators (a `Subset` over random transforms makes
    some). If there are draws, this and all later batches are fetched sample by sample, each under its own seed.
    """

    def __init__(self, data: Any, collate: Callable[[Sequence[Any]], Any], seed: int) -> None:
        self.data = data
        self.collate = collate
        self.seed = seed
        self.columns = _plain_columns(data, collate)
        self.is_batched = hasattr(data, "__getitems__")
        self.has_collate_drawn = False
        """True once `collate` has drawn random numbers in this process."""
        self._num_fetches = 0
        self.state: CollateState | None = None
        """State that a `collate` of the task's own may change; None if there is none, or it is not known yet."""
        self._is_aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Undo what `collate` changes within the context."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def __getitems__(self, request: FetchRequest) -> Any:
        """Fetch one batch."""
        if self.columns is not None:
            rows = torch.from_numpy(request.indices)
            return tuple([column.index_select(0, rows) for column in self.columns])
        with guarded():  # data may read the model
            return self._fetch(request)

    def _fetch(self, request: FetchRequest) -> Any:
        self._num_fetches += 1
        if self.is_batched:
            if not self._is_probed():
                return self._fetch_batched(request)
            with kept_global_randomness():
                seed_for_sample(0, 0, 0)
                before = _next_draws()
                seed_for_sample(0, 0, 0)
                batch = self._fetch_batched(request)
                if _next_draws() == before:
                    return batch
            self.is_batched = False
        return self._fetch_one_by_one(request)

    def _fetch_batched(self, request: FetchRequest) -> Any:
        indices = request.indices.tolist()
        with at_epoch(self.seed, request.epoch), _naming("fetching", indices):
            fetched = self.data.__getitems__(indices)
        return self.collated(fetched, indices, request.epoch) if isinstance(fetched, list) else fetched

    def sample(self, index: int, epoch: int = 0) -> Any:
        """Return one sample as in an epoch, not collated."""
        with kept_global_randomness(), at_epoch(self.seed, epoch):
            seed_for_sample(self.seed, epoch, index)
            return self.data[index]

    def _fetch_one_by_one(self, request: FetchRequest) -> Any:
        samples = []
        indices = request.indices.tolist()
        with kept_global_randomness(), at_epoch(self.seed, request.epoch):
            for index in indices:
                seed_for_sample(self.seed, request.epoch, index)
                with _naming("fetching", [index]):
                    samples.append(self.data[index])
        return self.collated(samples, indices, request.epoch)

    def collated(self, samples: Sequence[Any], indices: Sequence[int], epoch: int) -> Any:
        """Return samples as a batch, collated under the seed of the epoch and the samples."""
        if _is_default(self.collate):  # the default draws nothing, and seeding takes longer than a small batch
            with _naming("collating", indices, samples):
                return self.collate(samples)
        undone = self.state.undone() if self._is_aside and self.state is not None else nullcontext()
        with undone, kept_global_randomness(), _naming("collating", indices, samples):
            seed_for_batch(self.seed, epoch, indices)
            before = GeneratorStates.now() if self._is_probed() else None
            batch = self.collate(samples)
            if before is not None and not GeneratorStates.now().is_same_as(before):
                self.has_collate_drawn = True
            return batch

    def _is_probed(self) -> bool:
        """Return whether this fetch is checked for draws: the first few are, and every power of two."""
        fetches = self._num_fetches
        return fetches <= _PROBED_FETCHES or not fetches & (fetches - 1)


@contextmanager
def _naming(doing: str, indices: Sequence[int], samples: Sequence[Any] = ()) -> Iterator[None]:
    """Add to an exception the indices of the samples being processed, and the samples that differ from the rest."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {doing} sample{'s' if len(indices) > 1 else ''} {few(indices, _MOST_NAMED)} of the data")
        with suppress(Exception):  # samples of unusual classes may fail here; only the task's error matters
            if samples and (text := odd_samples(samples, indices)) is not None:
                error.add_note(text)
        raise


def _plain_columns(data: Any, collate: Callable[[Sequence[Any]], Any]) -> Sequence[torch.Tensor] | None:
    """Return the tensors of data made of host tensors only, whose batches are one index operation; None otherwise."""
    is_plain = (type(data) is TensorDataset and _is_default(collate)) or (
        type(data) is TensorData and data.transform is None
    )
    if is_plain and all(column.device.type == "cpu" and not column.is_sparse for column in data.tensors):
        return cast(Sequence[torch.Tensor], data.tensors)
    return None


def _is_default(collate: Callable[[Sequence[Any]], Any]) -> bool:
    return getattr(collate, "__func__", None) is Task.collate


def _next_draws() -> tuple[float, float, int]:
    return random.random(), float(np.random.random()), int(torch.randint(2**31, (1,)))


class Loader:
    """Source of batches on the device for a sequence of requests, in order, with or without loader processes."""

    def __init__(
        self, fetch: SampleFetch, device: torch.device, num_workers: int, prefetch_factor: int | None = None
    ) -> None:
        self._fetch = fetch
        self._device = device
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self._fetch.seed

    @property
    def data(self) -> Any:
        """Data set."""
        return self._fetch.data

    @property
    def has_workers(self) -> bool:
        """True if loader processes fetch the batches, each from its own copy of the data set."""
        return self._num_workers > 0

    @property
    def has_collate_drawn(self) -> bool:
        """True if `collate` has drawn random numbers in this process."""
        return self._fetch.has_collate_drawn or self.has_collate_own_draws

    @property
    def has_collate_own_draws(self) -> bool:
        """True if `collate` has drawn from generators of the task's own in this process."""
        return self._fetch.state is not None and self._fetch.state.has_drawn

    def sample(self, index: int) -> Any:
        """Return one sample as in the first epoch, not collated."""
        return self._fetch.sample(index)

    def collated(self, samples: Sequence[Any], indices: Sequence[int]) -> Any:
        """Return samples as a batch on the host, as in the first epoch.

        Args:
            samples: Samples as `sample` returns them.
            indices: Their indices.
        """
        return self._fetch.collated(samples, indices, epoch=0)

    @property
    def left_by_collate(self) -> tuple[str, ...]:
        """Iterators that reads before training have moved, if `collate` keeps state."""
        return () if self._fetch.state is None else self._fetch.state.left

    def watch_collate(self, objects: Mapping[str, object]) -> None:
        """Let the loaders of `without_workers` undo what `collate` changes.

        Args:
            objects: Objects whose state it may change, by name.
        """
        self._fetch.state = None if _is_default(self._fetch.collate) else CollateState(objects)

    def collate_changes(self, groups: Sequence[Sequence[int]]) -> CollateChanges:
        """Return the state that `collate` changes.

        Args:
            groups: Indices of samples of the first epoch, in two groups.
        """
        if self._fetch.state is None or self._fetch.columns is not None or not all(groups):
            return CollateChanges()
        fetched = {index: self.sample(index) for indices in groups for index in indices}

        def collated(indices: Sequence[int]) -> Any:
            return self.collated([fetched[index] for index in indices], indices)

        return self._fetch.state.changes(collated, groups)

    def in_process(self) -> "Loader":
        """Return a loader of the same data that fetches in this process."""
        return Loader(self._fetch, self._device, 0)

    def without_workers(self) -> "Loader":
        """Return a loader of the same data that fetches in this process, and leaves the state of `collate` as it is."""
        return _Aside(self._fetch, self._device)

    def batches(self, requests: Iterable[FetchRequest]) -> Iterator[Any]:
        """Yield one batch per request."""
        host_batches = self._on_host(requests)
        if self._device.type == "cpu":
            return iter(host_batches)
        if copies_beside(self._device.type):
            return _copied_beside(host_batches, self._device)
        return (to_device(batch, self._device) for batch in host_batches)

    def _on_host(self, requests: Iterable[FetchRequest]) -> Iterable[Any]:
        return self._with_workers(requests) if self._num_workers else map(self._fetch.__getitems__, requests)

    def _with_workers(self, requests: Iterable[FetchRequest]) -> Iterator[Any]:
        is_pinned = copies_beside(self._device.type)
        loader = DataLoader(
            self._fetch,
            batch_sampler=cast(Any, _Requests(requests)),
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            collate_fn=partial(_Packed, is_pinned),
            worker_init_fn=partial(_begin_loading, os.getpid()),
            pin_memory=is_pinned,
            # regardless of the start method of the program or Python 3.14: data need not be picklable, a fork server is
            # not the rank's child, and a fresh interpreter could not import the task's file under its name here
            multiprocessing_context="fork",
            # by default the workers' seeds are drawn from the generator that dropout uses
            generator=torch.Generator().manual_seed(self._fetch.seed),
        )
        # a signal to the whole group would kill a loader that has just started: torch resets SIGTERM to its default
        # there
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            batches = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        LOADER_DEATHS.watch()
        return _Awaited(batches)


class _Aside(Loader):
    """Loader for batches that are no part of the training."""

    def __init__(self, fetch: SampleFetch, device: torch.device) -> None:
        super().__init__(fetch, device, 0)

    def _on_host(self, requests: Iterable[FetchRequest]) -> Iterator[Any]:
        for request in requests:
            with self._fetch.aside():
                batch = self._fetch.__getitems__(request)
            yield batch


def _copied_beside(host_batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy each batch on a separate stream, while the device still computes the one before.

    No batch is fetched before it is asked for: its samples may depend on what the step before has set.
    """
    stream = torch.Stream(device)
    for batch in host_batches:
        with stream:
            # the caching host allocator keeps pinned memory until its copy is done
            ready = to_device(map_tensors(batch, _pinned), device)
        computing = torch.accelerator.current_stream(device)
        computing.wait_stream(stream)
        # the copy was allocated on the other stream, which must not reuse its memory while it is in use here
        for tensor in tensors_in(ready):
            tensor.record_stream(computing)
        yield ready
        # release this batch's memory before the next is fetched
        del batch, ready


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else _written_out(tensor).pin_memory()


def _written_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory for each element: torch does not pin those that `expand` returns."""
    if tensor.layout != torch.strided or tensor.is_nested or 0 not in tensor.stride():
        return tensor
    return tensor.contiguous()


class _Awaited:
    """Batches of loader processes; a death of one of these is raised while a batch is awaited."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with LOADER_DEATHS.raised():
            return next(self._batches)


class _Requests:
    """Sampler that makes a DataLoader fetch whole batches."""

    def __init__(self, requests: Iterable[FetchRequest]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[FetchRequest]:
        return iter(self._requests)


class _Packed:
    """Batch of a loader process, pickled where it was made; its unpickled copy is the batch itself.

    A queue pickles in a thread of its own, and what fails there is lost: the batch never arrives, and the rank waits
    for it for ever. Here the failure is one of the fetch, which is raised in the rank.
    """

    def __init__(self, is_pinned: bool, batch: Any) -> None:
        try:
            self._pickled = bytes(ForkingPickler.dumps(map_tensors(batch, _written_out) if is_pinned else batch))
        except Exception as error:
            doing = "while handing over a batch from a loader process, which pickles it; --num-workers 0 does not"
            error.add_note(doing)
            raise

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


def _begin_loading(rank_pid: int, worker_id: int) -> None:
    # a signal to the whole terminal group is meant for the rank, which stops its loaders after its checkpoint
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # signals that arrived meanwhile are discarded, because they are ignored now
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    die_with_parent(rank_pid)
    sys.excepthook = partial(_report_unless_rank_lost, sys.excepthook)


def _report_unless_rank_lost(
    report: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Report an exception as before, unless it says that the rank went away while it received a batch.

    The kernel closes a killed rank's sockets before it kills the rank's loaders.
    """
    is_of_sharer = trace is not None and trace.tb_frame.f_globals is vars(resource_sharer)
    if not (is_of_sharer and issubclass(kind, ConnectionError | EOFError)):
        report(kind, error, trace)
