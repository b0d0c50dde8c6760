"""Observer of the `DataLoader`s of a script: which samples each fetch gives, and the batches themselves.

One process that is compared with the ranks gets their joined batches at each fetch. Its own samplers and streams are
asked, too, but only for which samples an epoch has in one process.
"""

import functools
import hashlib
import os
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Subset

from dure.scripts.prove.draws import Draws
from dure.scripts.prove.feeding import Batches, NoMoreBatches, shaped
from dure.scripts.prove.naming import line_of_script
from dure.scripts.prove.recording import CannotJoin, Fetch, Loader, Order, Recording, plain_batch
from dure.torchcompat.script_calls import FetchHooks, next_index, take_part_in_fetches

_SEED = 0
_KEPT_BYTES = 1 << 28
"""Bytes of batches that a rank keeps in all; later ones are not given to one process."""
_DIGESTED_BYTES = 1 << 30
"""Bytes of samples that a rank reads for their digests."""
_OWN_SECONDS = 30.0
"""Seconds for which one process reads its own data, to know which samples an epoch has."""


class Loaders:
    """Loaders of this process.

    Args:
        recording: Recording for what is seen.
        order: Order for this rank.
        batches: Batches of the ranks that one process is given; None on a rank.
        end: Function that ends this process because it has seen enough.
    """

    def __init__(self, recording: Recording, order: Order, batches: Batches | None, end: Callable[[], Any]) -> None:
        self._recording, self._order, self._batches, self._end = recording, order, batches, end
        self._pid = os.getpid()
        self._numbers: dict[str, int] = {}
        """Number of each loader, by its key."""
        self._lines: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._data: list[Any] = []
        self._data_by_line: dict[str, list[Any]] = {}
        self._shapes: dict[int, Any] = {}
        """First batch of each loader."""
        self._passes: list[int] = []
        self._since_backward: list[Fetch] = []
        self._iterators: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._kept_bytes = self._digested_bytes = 0
        self._draws = Draws()
        self.random_state: Any = None
        """State of the generators after the last fetch."""

    def install(self) -> None:
        """Observe from now on."""
        create, length = DataLoader.__init__, DataLoader.__len__

        @functools.wraps(create)
        def creating(loader: Any, *args: Any, **settings: Any) -> None:
            self._lines.setdefault(loader, line_of_script())
            create(loader, *args, **settings)
            self._number_of_data(loader.dataset)
            self._key_of(loader)  # by creation: ranks may begin to read in another order

        DataLoader.__init__ = creating  # type: ignore[method-assign, assignment]
        DataLoader.__len__ = self._measured(length, 0)  # type: ignore[method-assign]
        DistributedSampler.__len__ = self._measured(DistributedSampler.__len__, 1)  # type: ignore[method-assign]
        if self._order.follows_samples:
            self._draws.install()
        take_part_in_fetches(FetchHooks(self._begin_pass, self._index, self._fetch))

    def _measured(self, length: Callable[[Any], int], kind: int) -> Callable[[Any], int]:
        """Return a `__len__` that one process answers as the ranks did: its batches are theirs."""

        @functools.wraps(length)
        def measuring(measured: Any) -> int:
            own = length(measured)
            if os.getpid() != self._pid:
                return own
            data = 2 * self._number_of_data(measured.dataset) + kind
            known = own if self._batches is None else self._batches.length(data, own)
            self._recording.lengths[data] = known
            return known

        return measuring

    def mark_trained(self) -> None:
        """Mark the batches from which a backward may come: the last one, and those of passes that go on."""
        if not self._since_backward:
            return
        ended = {(each.loader, each.epoch) for each in self._since_backward if each.samples is None}
        last = self._since_backward[-1]
        for each in self._since_backward:
            is_open = (each.loader, each.epoch) not in ended
            each.is_trained = each.has_gradients and (is_open or each is last)
        self._since_backward = [last] if last.samples is None else []

    def _key_of(self, loader: Any) -> str:
        """Return the place where a loader was made, and the number of its data set among those of this place.

        A function may make loaders of several data sets, and a rank may make loaders that others do not.
        """
        line = self._lines.get(loader, "")
        here = self._data_by_line.setdefault(line, [])
        if all(loader.dataset is not each for each in here):
            here.append(loader.dataset)
        number = next(place for place, each in enumerate(here) if each is loader.dataset)
        return f"{line} {number}"

    def _number_of_loader(self, loader: Any) -> int:
        """Return the number of a loader; one that is made again at the same place for the same data has it already.

        One process takes that of the ranks, or of their next loader of the same data: some libraries make a second
        loader, on several ranks only.
        """
        key = self._key_of(loader)
        if key not in self._numbers:
            number = len(self._recording.loaders)
            if self._batches is not None:
                number = self._batches.number_of(key, {*self._numbers.values()})
            self._numbers[key] = number
            while len(self._recording.loaders) <= number:
                self._recording.loaders.append(self._described(loader, key))
                self._passes.append(0)
            self._recording.loaders[number] = self._described(loader, key)
        return self._numbers[key]

    def _number_of_data(self, data: Any) -> int:
        for number, known in enumerate(self._data):
            if known is data:
                return number
        self._data.append(data)
        return len(self._data) - 1

    def _described(self, loader: Any, key: str) -> Loader:
        sampler: Any = getattr(loader, "sampler", None)
        of_batches: Any = getattr(loader, "batch_sampler", None)
        if of_batches is not None and type(of_batches) is not BatchSampler:
            sampler = of_batches  # the loader's sampler is a mere default then
        name, data = type(sampler).__name__, loader.dataset
        is_shuffled = None
        if hasattr(sampler, "shuffle"):
            is_shuffled = bool(sampler.shuffle)
        elif name in ("RandomSampler", "SequentialSampler"):
            is_shuffled = name == "RandomSampler"
        elif sampler is of_batches and not hasattr(sampler, "epoch") and not hasattr(sampler, "set_epoch"):
            is_shuffled = False
        has_length = not isinstance(data, IterableDataset) and hasattr(data, "__len__")
        return Loader(
            key=key,
            line=self._lines.get(loader, ""),
            num_samples=len(data) if has_length else None,
            is_part=isinstance(data, Subset),
            sampler=name,
            is_shuffled=is_shuffled,
            has_replacement=bool(getattr(sampler, "replacement", False)),
            is_stream=isinstance(data, IterableDataset),
        )

    def _begin_pass(self, iterator: Any, loader: Any) -> None:
        number = self._number_of_loader(loader)
        before = self._iterators.get(iterator)
        # work that loader processes were given while the iterator was made
        waiting = before.indices if before is not None and before.loader < 0 else deque[Any]()
        self._iterators[iterator] = _Pass(number, self._passes[number], waiting, loader.dataset)
        self._passes[number] += 1

    def _index(self, iterator: Any, index: Any) -> None:
        if iterator not in self._iterators:  # loader processes are given work while the iterator is made
            self._iterators[iterator] = _Pass(-1, 0, deque(), None)
        self._iterators[iterator].indices.append(index)

    def _fetch(self, iterator: Any, own: Callable[[], Any]) -> Any:
        run = self._iterators.get(iterator)
        if run is None or run.loader < 0 or os.getpid() != self._pid:
            return own()
        fetch = Fetch(
            loader=run.loader,
            epoch=run.epoch,
            position=run.position,
            has_gradients=torch.is_grad_enabled(),
            step=self._recording.num_steps,
        )
        run.position += 1
        self._recording.fetches.append(fetch)
        self._since_backward.append(fetch)
        if self._batches is None:
            return self._observed(run, fetch, own)
        return self._fed(iterator, run, fetch, own, self._batches)

    def _observed(self, run: "_Pass", fetch: Fetch, own: Callable[[], Any]) -> Any:
        batch = own()
        index = run.indices.popleft() if run.indices else None
        fetch.size = size_of(batch)
        self._probe(run.loader, run.data)
        indices = _indices_of(index)
        if indices is not None and not self._recording.loaders[run.loader].is_stream:
            fetch.samples = _resolved(indices, run.data)
            if self._digested_bytes < _DIGESTED_BYTES:
                self._digested_bytes += _bytes_of(batch)
                fetch.digests = digests(batch, fetch.size)
        else:
            fetch.samples = digests(batch, fetch.size)
        self._keep(fetch, batch)
        if self._order.follows_samples:
            self._draws.begin_batch(fetch.size, [self._recording.rank], f"{fetch.epoch} {fetch.position}")
        elif self._recording.num_steps < self._order.num_steps:
            self.random_state = _random_state()
        return self.converted(batch)

    def _keep(self, fetch: Fetch, batch: Any) -> None:
        size = _bytes_of(batch)
        is_compared = self._recording.num_steps < self._order.num_steps
        if not is_compared and self._kept_bytes + size > _KEPT_BYTES:
            self._kept_bytes = _KEPT_BYTES  # no gaps: a smaller batch after this one is not kept either
            return
        self._kept_bytes += size
        try:
            fetch.batch = plain_batch(batch)
        except CannotJoin as error:
            if is_compared:
                self._recording.problems.append(str(error))

    def _fed(self, iterator: Any, run: "_Pass", fetch: Fetch, own: Callable[[], Any], batches: Batches) -> Any:
        if fetch.position == 0:
            self._look_at_own(iterator, run, own, batches)
        try:
            joined = batches.joined(fetch)  # raises StopIteration where no rank had more
        except NoMoreBatches:
            self._end()
            raise
        except CannotJoin as error:
            if self._recording.num_steps < self._order.num_steps:
                raise
            self._recording.problems.append(str(error))
            self._end()
        if self._order.follows_samples:
            self._draws.begin_batch(fetch.size, *batches.origin(fetch))
        return self.converted(shaped(self._shapes.get(run.loader), joined))

    def _look_at_own(self, iterator: Any, run: "_Pass", own: Callable[[], Any], batches: Batches) -> None:
        """Read what one process itself would be given, as far as the ranks have read."""
        first = None
        if run.loader not in self._shapes:
            with suppress(StopIteration):  # it may have no batch of its own
                first = self._shapes[run.loader] = own()  # for the types of its containers
        described = self._recording.loaders[run.loader]
        wanted, is_whole = batches.num_to_read(run.loader, run.epoch)
        if not wanted or (described.own_samples is not None and (described.is_own_whole or not is_whole)):
            return
        with _own_random_numbers():
            if batches.has_same_data(run.loader) and not described.is_stream:
                found = _own_indices(iterator, run, wanted)
                samples: list[Any] | None = None if found is None else _resolved(found, run.data)
            else:
                samples = _own_digests(own, first, wanted)
        if samples is not None:
            described.own_samples, described.is_own_whole = samples, is_whole

    def _probe(self, number: int, data: Any) -> None:
        """Read a few samples twice, with the same random numbers: do ranks have the same data, and is it repeatable?"""
        described = self._recording.loaders[number]
        if described.probes is not None or not described.num_samples:
            return
        while isinstance(data, Subset):
            data = data.dataset
        found: list[list[str]] = []
        with _own_random_numbers():
            try:
                places = sorted({0, len(data) // 2, len(data) - 1})
                for _ in range(2):
                    _seed_everything(_SEED)
                    found.append([each for place in places for each in _leaf_digests(data[place])])
                    time.sleep(0.002)  # a clock has another time then
            except Exception:
                return
        described.probes = [f"{len(data)}"] + [one for one, other in zip(*found, strict=False) if one == other]
        self._recording.is_repeatable = self._recording.is_repeatable is not False and found[0] == found[1]

    def converted(self, batch: Any) -> Any:
        """Return a batch in the precision of the comparison."""
        if not self._order.is_float64:
            return batch
        return pytree.tree_map(lambda each: each.double() if _is_floating(each) else each, batch)

    def end_batch(self) -> None:
        """Note that the loss of a batch was computed."""
        if self._order.follows_samples and self._recording.num_steps < self._order.num_steps:
            self._recording.draw_states.append(self._draws.end_batch())

    def has_drawn(self) -> bool:
        """Return whether random numbers were drawn since the last fetch."""
        return self.random_state is not None and _random_state() != self.random_state


class _Pass:
    """Pass over the data of a loader."""

    def __init__(self, loader: int, epoch: int, indices: deque[Any], data: Any) -> None:
        self.loader, self.epoch, self.indices, self.data = loader, epoch, indices, data
        self.position = 0


def size_of(batch: Any) -> int:
    """Return the first dimension of a batch's first tensor; 0 without one."""
    for each in pytree.tree_leaves(batch):
        if isinstance(each, Tensor) and each.dim():
            return each.shape[0]
    return 0


def digests(batch: Any, size: int) -> list[str]:
    """Return a digest of each sample of a batch."""
    leaves = [
        each for each in pytree.tree_leaves(batch) if isinstance(each, Tensor) and each.dim() and len(each) == size
    ]
    rows = [[] for _ in range(size)]  # type: list[list[bytes]]
    for leaf in leaves:
        for place, row in enumerate(leaf.detach().cpu().contiguous()):
            rows[place].append(
                row.contiguous().view(torch.uint8).numpy().tobytes() if row.dim() else repr(row).encode()
            )
    if not leaves:
        rows = [[repr(batch).encode()]]
    return [hashlib.blake2b(b"".join(row), digest_size=8).hexdigest() for row in rows]


def _leaf_digests(sample: Any) -> list[str]:
    """Return a digest of each tensor, number and text of a sample."""
    return [digests([leaf[None] if isinstance(leaf, Tensor) else leaf], 1)[0] for leaf in pytree.tree_leaves(sample)]


def _own_indices(iterator: Any, run: _Pass, wanted: int) -> list[int] | None:
    """Return the indices of a pass in one process, up to a number of samples."""
    found: list[int] = []
    taken = 0
    while len(found) < wanted:
        if len(run.indices) <= taken:
            try:
                next_index(iterator)  # it is noted in run.indices
            except StopIteration:
                break
        indices = _indices_of(run.indices[taken])
        if indices is None:
            return None
        found += indices
        taken += 1
    return found


def _own_digests(own: Callable[[], Any], first: Any, wanted: int) -> list[str] | None:
    """Return digests of the samples of a pass in one process, up to a number of samples."""
    found = [] if first is None else digests(first, size_of(first))
    deadline = time.monotonic() + _OWN_SECONDS
    while len(found) < wanted:
        try:
            batch = own()
        except StopIteration:
            return found
        found += digests(batch, size_of(batch))
        if time.monotonic() > deadline:
            return None
    return found


def _indices_of(index: Any) -> list[int] | None:
    if isinstance(index, list) and all(isinstance(each, int | np.integer) for each in index):
        return [int(each) for each in index]
    return [index] if isinstance(index, int) else None


def _resolved(indices: list[int], data: Any) -> list[int]:
    """Return the indices in the data set of which another may be a part."""
    while isinstance(data, Subset):
        indices, data = [int(data.indices[each]) for each in indices], data.dataset
    return indices


def _bytes_of(batch: Any) -> int:
    return sum(int(getattr(each, "nbytes", 0)) for each in pytree.tree_leaves(batch))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _random_state() -> tuple[Any, ...]:
    numbers: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numbers[1].tobytes(), numbers[2], random.getstate()


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave the generators as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
