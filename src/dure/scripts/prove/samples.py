"""Samples that the ranks were given: which, how often, and in which order."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from dure.scripts.prove.certificate import Cause
from dure.scripts.prove.recording import Fetch, Loader, Recording


def causes_in_samples(ranks: Sequence[Recording]) -> Iterator[Cause]:
    """Yield what is wrong with the samples that the ranks train on."""
    for loader in ranks[0].loaders:
        passes = _training_passes(ranks, loader.key)
        epochs = sorted(set().union(*(each.keys() for each in passes)))
        if not epochs or not _have_same_data(ranks, loader.key) or _draws_again(passes):
            continue
        shared = _shared_in_first_batches(passes, loader)
        if shared is not None:
            yield shared
            continue
        for epoch in epochs:
            cause = _of_whole_epoch([each.get(epoch, []) for each in passes], loader, epoch)
            if cause is not None:
                yield cause
                break
        yield from _of_order(passes, loader, epochs)


def notes_on_samples(ranks: Sequence[Recording]) -> Iterator[str]:
    """Yield notes on samples that are no fault."""
    for loader in ranks[0].loaders:
        passes = _training_passes(ranks, loader.key)
        if not any(passes):
            continue
        if not _have_same_data(ranks, loader.key):
            yield "each rank has data of its own, so which samples are used twice or never is not known"
            continue
        if _draws_again(passes):
            yield f"{loader.sampler} draws samples with replacement, so none is expected once in an epoch"
            continue
        for epoch in sorted(set().union(*(each.keys() for each in passes))):
            of_ranks = [each.get(epoch, []) for each in passes]
            twice = _seen_twice([fetch for each in of_ranks for fetch in each])
            if _is_complete(of_ranks) and twice and _pads(loader, len(twice), len(ranks)):
                yield (
                    f"{len(twice)} sample{'s' * (len(twice) > 1)} of an epoch are used twice, because {loader.sampler} "
                    f"fills up the last batch of {loader.num_samples} samples for {len(ranks)} ranks"
                )
                break


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


def _have_same_data(ranks: Sequence[Recording], key: str) -> bool:
    """Return whether equal indices are equal samples on all ranks."""
    loaders = [loader for recording in ranks for loader in recording.loaders if loader.key == key]
    if len(loaders) != len(ranks):
        return False
    if any(each.is_part for each in loaders):
        return True
    repeatable = all(recording.is_repeatable is not False for recording in ranks)
    return not repeatable or all(each.probes == loaders[0].probes for each in loaders)


def _draws_again(passes: Sequence[dict[int, list[Fetch]]]) -> bool:
    """Return whether a rank by itself got a sample more than once in a pass, beyond one that fills up a batch."""
    return any(len(_seen_twice(fetches)) > 1 for each in passes for fetches in each.values())


def _samples(fetches: Sequence[Fetch]) -> list[Any]:
    return [sample for fetch in fetches for sample in fetch.samples or ()]


def _is_complete(of_ranks: Sequence[Sequence[Fetch]]) -> bool:
    return all(fetches and fetches[-1].samples is None for fetches in of_ranks)


def _seen_twice(fetches: Sequence[Fetch]) -> list[Any]:
    return [sample for sample, count in Counter(_samples(fetches)).items() if count > 1]


def _pads(loader: Loader, num_twice: int, world_size: int) -> bool:
    """Return whether so many repeated samples are those with which a sampler makes all ranks' parts equally long."""
    is_padding = loader.num_samples is not None and loader.num_samples % world_size != 0 and num_twice < world_size
    return is_padding and loader.sampler not in ("RandomSampler", "SequentialSampler")


def _shared_in_first_batches(passes: Sequence[dict[int, list[Fetch]]], loader: Loader) -> Cause | None:
    first = [_samples(each.get(0, [])[:1]) for each in passes]
    if len(first) < 2 or not all(first):
        return None
    common = set(first[0]).intersection(*first[1:])
    if len(common) < max(1, len(set(first[0])) // 2):
        return None
    is_same = all(set(each) == set(first[0]) for each in first)
    return Cause(
        id="same_samples_on_all_ranks",
        what=f"all ranks train on the {'same' if is_same else 'largely same'} samples (the first batch of rank 0 and "
        f"rank 1 has {len(common)} samples in common, such as {sorted(common, key=str)[0]})",
        cure="give the DataLoader a torch.utils.data.DistributedSampler, and leave shuffle out",
        line=loader.line,
        step=1,
    )


def _of_whole_epoch(of_ranks: Sequence[Sequence[Fetch]], loader: Loader, epoch: int) -> Cause | None:
    if not _is_complete(of_ranks):
        return None
    fetches = [fetch for each in of_ranks for fetch in each]
    seen = _samples(fetches)
    twice = _seen_twice(fetches)
    if twice and not _pads(loader, len(twice), len(of_ranks)):
        return Cause(
            id="samples_seen_twice",
            what=f"{len(twice)} of {len(set(seen))} samples are used more than once in epoch {epoch + 1}, such as "
            f"{sorted(twice, key=str)[0]}",
            cure="divide the samples with a torch.utils.data.DistributedSampler that all ranks seed alike",
            line=loader.line,
        )
    if loader.num_samples is not None and all(isinstance(each, int) for each in seen):
        num_missing = loader.num_samples - len(set(seen))
        missing = sorted(set(range(loader.num_samples)) - set(seen))
        # a last batch that is left out (drop_last) is no fault
        most_left_out = max(1, max((len(fetch.samples or ()) for fetch in fetches), default=1) * len(of_ranks))
        example = "" if loader.is_part or not missing else f", such as {missing[0]}"
        if num_missing >= most_left_out:
            return Cause(
                id="samples_never_seen",
                what=f"{num_missing} of {loader.num_samples} samples are used by no rank in epoch {epoch + 1}{example}",
                cure="give every rank its own part of all samples: DistributedSampler(dataset) with the group's size",
                line=loader.line,
            )
    return None


def _of_order(passes: Sequence[dict[int, list[Fetch]]], loader: Loader, epochs: Sequence[int]) -> Iterator[Cause]:
    for one, other in pairwise(epochs):
        orders = [(_samples(each.get(one, [])), _samples(each.get(other, []))) for each in passes]
        common = [min(len(first), len(second)) for first, second in orders]
        if not all(common) or max(common) < 4:
            continue
        is_same = all(first[:n] == second[:n] for (first, second), n in zip(orders, common, strict=True))
        if loader.num_samples is None:  # a stream may have one order
            continue
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
