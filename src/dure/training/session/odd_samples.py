"""Search for samples that differ from the rest of their batch, to explain a failed collate."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

_MOST_NAMED = 3
"""Maximum number of differing samples to name; if more differ, the difference is taken as intended."""


def odd_samples(samples: Sequence[Any], indices: Sequence[int]) -> str | None:
    """Return a sentence on the few samples whose shapes or types differ from most of the others, or None.

    Args:
        samples: Samples of one batch, before they are collated.
        indices: Indices of the samples in the data.
    """
    found = [dict(_description(sample, "")) for sample in samples]
    usual, count = Counter(tuple(described.items()) for described in found).most_common(1)[0]
    odd = [number for number, described in enumerate(found) if tuple(described.items()) != usual]
    if not odd or len(odd) > min(_MOST_NAMED, count - 1):
        return None
    expected = dict(usual)
    texts = []
    for number in odd:
        paths = [path for path in {**found[number], **expected} if found[number].get(path) != expected.get(path)]
        is_own, of_others = found[number].get(paths[0], "missing"), expected.get(paths[0], "missing")
        texts.append(f"sample {indices[number]}{paths[0]} is {is_own}, where most others have {of_others}")
    return "; ".join(texts)


def _description(value: Any, path: str) -> "list[tuple[str, str]]":
    """Return the properties in which samples of a batch must agree (types, lengths and shapes), by path."""
    if isinstance(value, Tensor | np.ndarray):
        return [(path, f"{type(value).__name__} of shape {tuple(value.shape)}")]
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{number}]", item) for number, item in enumerate(value)]
    else:
        return [(path, type(value).__name__)]
    inner = [entry for name, item in items for entry in _description(item, path + name)]
    return [(path, f"{type(value).__name__} of {len(items)}"), *inner]
