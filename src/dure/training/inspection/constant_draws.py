"""Constant draws: every random operation of torch returns one value, whatever its shape.

A loss that draws returns another value at each call, so that the loss of a batch cannot be compared with those of its
parts. With constant draws it can.
"""

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from dure.torchcompat.modes import EagerDispatchMode

aten = torch.ops.aten

_MOST_DRAWS = 10_000
"""Maximum draws in one call of a loss; a call that draws until a condition holds would never end."""
_MOST_SECONDS = 4.0
"""Maximum seconds of such a call, for losses that compute a lot between two draws."""


class TooManyDraws(BaseException):
    """End of a call that keeps drawing; a BaseException, so that no `except Exception` of a task prevents it."""


class ConstantDraws(EagerDispatchMode):
    """Context in which torch's random operations return constants and leave generators alone.

    Unknown operations, and draws of Python and NumPy, run as always and are visible in the generators. Code that draws
    until a condition holds ends with `TooManyDraws`.
    """

    def __init__(self, quantile: float) -> None:
        """Choose the constants.

        Args:
            quantile: Fraction, above 0 and below 1, at which the value of each distribution is taken.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._quantile = quantile
        self._normal = statistics.NormalDist().inv_cdf(quantile)
        self._num_draws = 0
        self._begun_at = time.monotonic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, or return its constant."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = self._drawn(func, args, kwargs)
            if drawn is not None:
                self._num_draws += 1
                if self._num_draws > _MOST_DRAWS or time.monotonic() > self._begun_at + _MOST_SECONDS:
                    raise TooManyDraws
                return drawn
        return func(*args, **kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the constant result of an operation, or None if it is unknown."""
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if "out" in given:
            return None
        kind = func.overloadpacket
        if kind is aten.native_dropout:
            return self._dropped(given["input"], given["p"])
        if kind in _IN_PLACE or kind in _LIKE:
            target = given["self"]
            if kind in _LIKE:
                target = torch.empty_like(target, dtype=given.get("dtype"), device=given.get("device"))
            return self._fill(kind, target, given)
        if kind in _BY_SIZE:
            target = torch.empty(given.get("size", (given.get("n"),)), **_options(given, kind))
            return self._fill(kind, target, given)
        if kind in (aten.normal, aten.bernoulli, aten.multinomial):
            return self._from_parameters(kind, given)
        return None

    def _fill(self, kind: Any, target: Tensor, given: dict[str, Any]) -> Any:
        """Fill a tensor with the constant of a distribution with given parameters."""
        quantile = self._quantile
        if kind in (aten.rand, aten.rand_like):
            return target.fill_(quantile)
        if kind in (aten.randn, aten.randn_like):
            return target.fill_(self._normal)
        if kind in (aten.randint, aten.randint_like):
            low, high = given.get("low", 0), given["high"]
            return target.fill_(low + int(quantile * (high - low)))
        if kind is aten.randperm:  # a rotation by one, because a constant is no permutation
            return target.copy_(torch.arange(len(target)).roll(1))
        if kind is aten.uniform_:
            begin, end = given.get("from", 0.0), given.get("to", 1.0)
            return target.fill_(begin + quantile * (end - begin))
        if kind is aten.normal_:
            return target.fill_(given.get("mean", 0.0) + self._normal * given.get("std", 1.0))
        if kind is aten.exponential_:
            return target.fill_(-math.log(1 - quantile) / given.get("lambd", 1.0))
        return target.copy_(torch.as_tensor(quantile < given.get("p", 0.5)))  # bernoulli_

    def _from_parameters(self, kind: Any, given: dict[str, Any]) -> Any:
        """Return draws of a distribution whose parameters are tensors, element by element."""
        if kind is aten.normal:
            mean, std = given.get("mean", 0.0), given.get("std", 1.0)
            if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
                return None
            return mean + self._normal * std
        if kind is aten.bernoulli:
            own = given["self"]
            return torch.empty_like(own).copy_(torch.as_tensor(self._quantile < given.get("p", own)))
        if given.get("replacement", False):  # independent draws, of which a part of a batch may take fewer
            sums = given["self"].cumsum(-1)
            found = (sums <= self._quantile * sums[..., -1:]).sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)
            return found.expand(*sums.shape[:-1], given["num_samples"]).clone()
        return given["self"].topk(given["num_samples"], -1).indices

    def _dropped(self, value: Tensor, probability: float) -> tuple[Tensor, Tensor]:
        is_kept = self._quantile >= probability
        factor = 1 / (1 - probability) if is_kept else 0.0
        return value * factor, torch.full_like(value, is_kept, dtype=torch.bool)


_IN_PLACE = (aten.uniform_, aten.normal_, aten.exponential_, aten.bernoulli_)
_LIKE = (aten.rand_like, aten.randn_like, aten.randint_like)
_BY_SIZE = (aten.rand, aten.randn, aten.randint, aten.randperm)


def _options(given: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return the dtype and device of a new tensor."""
    dtype = given.get("dtype") or (torch.int64 if kind in (aten.randint, aten.randperm) else None)
    return {"dtype": dtype, "device": given.get("device")}
