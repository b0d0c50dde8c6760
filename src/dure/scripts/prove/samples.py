"""Samples that the ranks were given: which, how often, and in which order."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dure.scripts.prove.certificate import Cause
from dure.scripts.prove.feeding import have_same_data
from dure.scripts.prove.recording import Fetch, Loader, Recording

_FEWEST_ALIKE = 8
"""Samples that must be the same, one after the other, on all ranks whose samplers draw with replacement."""
_NO_COINCIDENCE = 3
"""Repeated samples of an epoch that is not whole from which on they are no coincidence of a custom sampler."""


def causes_in_samples(ranks: Sequence[Recording], one: Recording | None = None) -> Iterator[Cause]:
    """Yield what is wrong with the samples that the ranks train on.

    Args:
        ranks: Recordings of all ranks.
        one: Recording of one process, with what itself would have been given; None if there is none.
    """
    for data in _loaders(ranks, one):
        if not data.epochs:
            continue
        shared = _shared_in_first_batches(data)
        if shared is not None:
            yield shared
            continue
        cause = next((found for epoch in data.epochs if (found := _of_epoch(data, epoch)) is not None), None)
        if cause is not None:
            yield cause
        if not data.draws_again:
            yield from _of_order(data)


def notes_on_samples(ranks: Sequence[Recording], one: Recording | None = None) -> Iterator[str]:
    """Yield notes on samples that are no fault."""
    for data in _loaders(ranks, one):
        loader = data.loader
        if not any(data.passes):
            continue
        if data.draws_again:
            yield f"{loader.sampler} draws samples with replacement, so none is expected once in an epoch"
            continue
        if data.own is None and not data.has_same_data:
            yield "each rank has data of its own, so which samples are used twice or never is not known"
        if not any(data.is_complete(epoch) for epoch in data.epochs):
            yield (
                "no whole epoch was followed (--sample-steps), so samples that are never used, and an order that comes "
                "again, are not seen"
            )
        for epoch in data.epochs:
            twice = data.twice(epoch)
            if data.is_complete(epoch) and twice and _pads(data, epoch, twice):
                yield (
                    f"{len(twice)} sample{'s' * (len(twice) > 1)} of an epoch are used twice, because {loader.sampler} "
                    f"fills up the last batch of {loader.num_samples} samples for {len(ranks)} ranks"
                )
                break


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Fetches of all ranks by one loader for training."""

    loader: Loader
    passes: list[dict[int, list[Fetch]]]
    """Fetches of each rank, by pass."""
    has_same_data: bool
    """True if equal indices are equal samples on all ranks."""
    own: list[Any] | None
    """Samples that one process would be given in a pass; None if unknown."""
    is_own_whole: bool
    """True if the ranks have read this pass to its end, so that the numbers of samples can be compared."""

    @property
    def epochs(self) -> list[int]:
        return sorted(set().union(*(each.keys() for each in self.passes)))

    @property
    def draws_again(self) -> bool:
        """Return whether the sampler draws with replacement, as on one process or by each rank."""
        if self.loader.is_stream:
            return False
        if self.loader.has_replacement:
            return True
        if self.own is not None:
            return len(_repeated(self.own)) > 1
        return self.has_same_data and any(
            len(_repeated(_samples(fetches))) > 1 for each in self.passes for fetches in each.values()
        )

    def fetches(self, epoch: int) -> list[list[Fetch]]:
        return [each.get(epoch, []) for each in self.passes]

    def samples(self, fetches: Sequence[Fetch]) -> list[Any]:
        """Return samples by what makes them the same on all ranks: their indices, or digests."""
        if self.has_same_data or self.loader.is_stream:
            return _samples(fetches)
        return [sample for fetch in fetches for sample in fetch.digests or ()]

    def all_samples(self, epoch: int) -> list[Any]:
        return [sample for fetches in self.fetches(epoch) for sample in self.samples(fetches)]

    def is_complete(self, epoch: int) -> bool:
        return all(fetches and fetches[-1].samples is None for fetches in self.fetches(epoch))

    def twice(self, epoch: int) -> list[Any]:
        """Return samples that are used more than once, and more often than one process itself would."""
        counts, own = Counter(self.all_samples(epoch)), Counter(self.own or ())
        return [sample for sample, count in counts.items() if count > max(1, own[sample])]


def _loaders(ranks: Sequence[Recording], one: Recording | None) -> Iterator[_Data]:
    for loader in ranks[0].loaders:
        alone = next((each for each in (one.loaders if one else ()) if each.key == loader.key), None)
        yield _Data(
            loader=loader,
            passes=_training_passes(ranks, loader.key),
            has_same_data=have_same_data(ranks, loader.key),
            own=None if alone is None else alone.own_samples,
            is_own_whole=alone is not None and alone.is_own_whole,
        )


def _training_passes(ranks: Sequence[Recording], key: str) -> list[dict[int, list[Fetch]]]:
    """Return for each rank the fetches of a loader for training, by pass.

    The end of a pass is a fetch without samples. A pass from which no backward may come is one of an evaluation.
    """
    found = []
    for recording in ranks:
        passes: defaultdict[int, list[Fetch]] = defaultdict(list)
        for fetch in recording.fetches:
            if recording.loaders[fetch.loader].key == key:
                passes[fetch.epoch].append(fetch)
        trained = {
            epoch: fetches
            for epoch, fetches in passes.items()
            if any(each.is_trained for each in fetches) and not _is_look(fetches, recording)
        }
        # by their order: a rank may evaluate in between, when others do not
        found.append(dict(enumerate(trained[epoch] for epoch in sorted(trained))))
    return found


def _is_look(fetches: Sequence[Fetch], recording: Recording) -> bool:
    """Return whether a pass is one batch that a script looks at, as for its shape, before it trains on others."""
    return len(fetches) == 1 and fetches[0].samples is not None and recording.num_steps > fetches[0].step + 1


def _samples(fetches: Sequence[Fetch]) -> list[Any]:
    return [sample for fetch in fetches for sample in fetch.samples or ()]


def _repeated(samples: Sequence[Any]) -> list[Any]:
    return [sample for sample, count in Counter(samples).items() if count > 1]


def _pads(data: _Data, epoch: int, twice: Sequence[Any]) -> bool:
    """Return whether repeated samples are those with which a sampler fills up the last batches of the ranks."""
    loader, world_size = data.loader, len(data.passes)
    batches = [[fetch for fetch in fetches if fetch.samples] for fetches in data.fetches(epoch)]
    longest = max((len(fetch.samples or ()) for fetches in batches for fetch in fetches), default=1)
    if loader.num_samples is None or loader.num_samples % (world_size * longest) == 0:
        return False
    if loader.sampler in ("RandomSampler", "SequentialSampler") or len(twice) >= world_size * longest:
        return False
    before = [sample for fetches in batches for sample in data.samples(fetches[:-1])]
    return not _repeated(before)


def _shared_in_first_batches(data: _Data) -> Cause | None:
    first = [data.samples(data_of_rank.get(0, [])[:1]) for data_of_rank in data.passes]
    if len(first) < 2 or not all(first):
        return None
    if data.draws_again:  # a small data set has the same sample in several batches
        all_of_pass = [data.samples(data_of_rank.get(0, [])) for data_of_rank in data.passes]
        length = min(map(len, all_of_pass))
        if length < _FEWEST_ALIKE or any(each[:length] != all_of_pass[0][:length] for each in all_of_pass):
            return None
    common = set(first[0]).intersection(*first[1:])
    if len(common) < max(1, len(set(first[0])) // 2):
        return None
    is_same = all(set(each) == set(first[0]) for each in first)
    example = sorted(common, key=str)[0]
    such_as = f", such as {example}" if isinstance(example, int) else ""
    return Cause(
        id="same_samples_on_all_ranks",
        what=f"all ranks train on the {'same' if is_same else 'largely same'} samples (the first batch of rank 0 and "
        f"rank 1 has {len(common)} samples in common{such_as})",
        cure="let the stream skip what belongs to other ranks, as by islice(stream, rank, None, world_size)"
        if data.loader.is_stream
        else "give the DataLoader a torch.utils.data.DistributedSampler, and leave shuffle out",
        line=data.loader.line,
        step=1,
    )


def _of_epoch(data: _Data, epoch: int) -> Cause | None:
    """Return what is wrong with the samples of an epoch, which need not be whole."""
    loader, twice = data.loader, data.twice(epoch)
    if data.draws_again:
        return None
    is_whole = data.is_complete(epoch)
    has_torch_sampler = loader.sampler in ("RandomSampler", "SequentialSampler", "DistributedSampler")
    is_coincidence = not is_whole and not has_torch_sampler and len(twice) < _NO_COINCIDENCE
    seen = data.all_samples(epoch)
    if twice and not is_coincidence and not _pads(data, epoch, twice):
        example = sorted(twice, key=str)[0]
        return Cause(
            id="samples_seen_twice",
            what=f"{len(twice)} of {len(set(seen))} samples are used more than once in epoch {epoch + 1}"
            + (f", such as {example}" if isinstance(example, int) else ""),
            cure=_cure_of_stream(loader)
            or "divide the samples with a torch.utils.data.DistributedSampler that all ranks seed alike",
            line=loader.line,
        )
    if not is_whole:
        return None
    # a last batch that is left out (drop_last) is no fault
    sizes = [len(fetch.samples or ()) for fetches in data.fetches(epoch) for fetch in fetches]
    most_left_out = max(1, max(sizes, default=1) * len(data.passes))
    if data.has_same_data and loader.num_samples is not None and all(isinstance(each, int) for each in seen):
        return _of_never_seen(loader, seen, most_left_out, epoch)
    return _of_other_count(data, most_left_out, epoch)


def _cure_of_stream(loader: Loader) -> str:
    if not loader.is_stream:
        return ""
    return "let each rank, and each of its loader processes (get_worker_info), skip what belongs to others"


def _of_never_seen(loader: Loader, seen: Sequence[int], most_left_out: int, epoch: int) -> Cause | None:
    num_missing = (loader.num_samples or 0) - len(set(seen))
    missing = sorted(set(range(loader.num_samples or 0)) - set(seen))
    example = "" if loader.is_part or not missing else f", such as {missing[0]}"
    if num_missing < most_left_out:
        return None
    return Cause(
        id="samples_never_seen",
        what=f"{num_missing} of {loader.num_samples} samples are used by no rank in epoch {epoch + 1}{example}",
        cure="give every rank its own part of all samples: DistributedSampler(dataset) with the group's size",
        line=loader.line,
    )


def _of_other_count(data: _Data, most_left_out: int, epoch: int) -> Cause | None:
    """Return a cause if an epoch of all ranks has more or fewer samples than that of one process."""
    if data.own is None or not data.is_own_whole:
        return None
    num_seen = sum(len(fetch.samples or ()) for fetches in data.fetches(epoch) for fetch in fetches)
    more = num_seen - len(data.own)
    if more >= most_left_out:
        return Cause(
            id="samples_seen_twice",
            what=f"an epoch has {num_seen} samples on all ranks together, and {len(data.own)} in one process: what the "
            "ranks read is not divided over them",
            cure=_cure_of_stream(data.loader) or "give every rank its own part of the samples",
            line=data.loader.line,
        )
    if -more >= most_left_out:
        return Cause(
            id="samples_never_seen",
            what=f"an epoch has {num_seen} samples on all ranks together, and at least {len(data.own)} in one process",
            cure="give every rank its own part of all samples, and no sample to none",
            line=data.loader.line,
        )
    return None


def _of_order(data: _Data) -> Iterator[Cause]:
    loader = data.loader
    if loader.is_stream or loader.num_samples is None:  # a stream may have one order
        return
    for one, other in pairwise(data.epochs):
        orders = [(_samples(each.get(one, [])), _samples(each.get(other, []))) for each in data.passes]
        common = [min(len(first), len(second)) for first, second in orders]
        if not all(common) or max(common) < 4:
            continue
        is_same = all(first[:n] == second[:n] for (first, second), n in zip(orders, common, strict=True))
        is_sorted = all(first == sorted(first, key=_as_number) for first, _ in orders)
        if is_same and not is_sorted and loader.is_shuffled is not False:
            yield Cause(
                id="same_order_every_epoch",
                what=f"epoch {other + 1} has the order of epoch {one + 1}: the sampler was not told the epoch",
                cure="call sampler.set_epoch(epoch) before each epoch",
                line=loader.line,
            )
            return


def _as_number(sample: Any) -> Any:
    return (isinstance(sample, str), sample)
