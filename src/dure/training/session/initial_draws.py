"""Initial values of large weights, drawn by several threads when a model is built again.

Each draw depends on the generator's state before it and changes that state, so a first build must draw one weight after
the other. It records the generator's state after each weight. A later build, after a failure or at a resume, sets the
generator to the recorded state at once, while threads draw the values (`benchmarks/initial_draws.py`).
"""

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dure.strategies.state.containers import tensors_in

_LEAST_ITEMS = 2**16
"""Items of the smallest tensor whose draw is recorded; drawing a smaller one takes no longer than looking it up."""
_WORTHWHILE_ITEMS = 2**24
"""Minimum items of all draws for which their record is kept: drawing them takes a tenth of a second."""
_MOST_DRAWS = 4096
"""Maximum recorded draws, of 5 kB each."""
_NEED_NO_GRAD = (Tensor.uniform_, Tensor.normal_)
_DRAWS = (*_NEED_NO_GRAD, nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_)
_ASK_NO_VALUES = (Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.requires_grad_)
_EXPOSE_MEMORY = (
    "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "_typed_storage", "storage", "share_memory_",
    "__reduce_ex__", "set_",
)  # fmt: skip
"""Names of methods after which a tensor may be read without a call that a mode sees."""


class InitialDraws:
    """States of torch's generator after the draws of a build, by all that each draw depends on."""

    def __init__(self, states: Mapping[str, bytes] | None = None) -> None:
        self._states = dict(states or {})
        self._num_items = 0
        self.is_new = False
        """True if states worth keeping were recorded."""

    @classmethod
    def from_json(cls, record: Any) -> "InitialDraws":
        """Convert from the JSON value of `to_json`; a damaged one has no states."""
        try:
            states = {key: base64.b64decode(state) for key, state in record["states"].items()}
            sizes = {len(state) for state in states.values()} | {torch.default_generator.get_state().numel()}
            return cls(states if len(sizes) == 1 and record["digest"] == _digest(states) else {})
        except (ValueError, TypeError, LookupError, AttributeError):
            return cls()

    def to_json(self) -> dict[str, Any]:
        """Return all states as a JSON value."""
        states = {key: base64.b64encode(state).decode() for key, state in self._states.items()}
        return {"digest": _digest(self._states), "states": states}

    @contextmanager
    def of_build(self) -> Iterator[None]:
        """Record the draws in the context, or make recorded ones in threads; wait for all values at its end."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads, _Draws(self, threads) as draws:
            yield
            draws.wait()

    def after(self, key: str) -> Tensor | None:
        """Return the generator's state after a draw, or None if the draw is not recorded."""
        state = self._states.get(key)
        return None if state is None else torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def record(self, key: str, state: Tensor, num_items: int) -> None:
        """Record the generator's state after a draw."""
        if len(self._states) < _MOST_DRAWS:
            self._states[key] = state.numpy().tobytes()
            self._num_items += num_items
            self.is_new = self._num_items >= _WORTHWHILE_ITEMS


def _digest(states: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for key, state in sorted(states.items()):
        digest.update(key.encode())
        digest.update(state)
    return digest.hexdigest()


class _Draws(TorchFunctionMode):
    """Context that sees the draws of a build, and each call that may read what threads are still drawing."""

    def __init__(self, known: InitialDraws, threads: ThreadPoolExecutor) -> None:
        super().__init__()
        self._known = known
        self._threads = threads
        self._pending: dict[int, Future[None]] = {}
        """Draws that are not known to have ended, by the address of the memory."""
        self._is_exposed = False
        """True once a tensor may be read without a call that is seen."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DRAWS and "tensor" in kwargs:  # as torch.nn.init passes it on
            args = (kwargs.pop("tensor"), *args)
        if func in _DRAWS and _is_plain(func, args, kwargs):
            return self._draw(func, args[0], args[1:], kwargs)
        name = getattr(func, "__name__", "")
        if name in _EXPOSE_MEMORY:
            self.wait()
            self._is_exposed = True
        elif self._pending and name != "__get__" and func not in _ASK_NO_VALUES:
            for tensor in tensors_in([args, kwargs]):
                self._wait_for(tensor)
        return func(*args, **kwargs)

    def wait(self) -> None:
        """Wait until all values are drawn."""
        while self._pending:
            self._pending.popitem()[1].result()

    def _draw(self, func: Any, target: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._wait_for(target)
        generator = torch.default_generator
        before = generator.get_state()
        key = _key(before, func, target, args, kwargs)
        after = self._known.after(key)
        if after is None or self._is_exposed:
            result = func(target, *args, **kwargs)
            if after is None:
                self._known.record(key, generator.get_state(), target.numel())
            return result
        generator.set_state(after)
        values = target.detach()
        self._pending[_address(target)] = self._threads.submit(_draw_apart, func, values, args, kwargs, before)
        return target

    def _wait_for(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            return
        try:
            address = _address(tensor)
        except (RuntimeError, NotImplementedError):  # of a kind without memory of its own
            self.wait()
            return
        if (draw := self._pending.pop(address, None)) is not None:
            draw.result()


def _is_plain(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a draw fills a large tensor from the default generator, by numbers alone."""
    if not args or type(args[0]) not in (Tensor, nn.Parameter):
        return False
    target, given = args[0], [*args[1:], *(value for name, value in kwargs.items() if name != "generator")]
    return (
        target.device.type == "cpu"
        and target.layout == torch.strided
        and target.numel() >= _LEAST_ITEMS
        and target.is_contiguous()
        and kwargs.get("generator") in (None, torch.default_generator)
        and all(isinstance(value, int | float | str) for value in given)
        # torch refuses such a draw
        and not (
            target.requires_grad and torch.is_grad_enabled() and getattr(func, "__module__", "") != "torch.nn.init"
        )
        and not torch.is_inference_mode_enabled()
        and _owns_memory(target)
    )


def _owns_memory(tensor: Tensor) -> bool:
    """Return whether nothing but tensors holds a tensor's memory, as NumPy may."""
    try:
        return tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):  # it is one of `torch.func`, without memory of its own
        return False


def _key(before: Tensor, func: Any, target: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a digest of all that a draw depends on."""
    given = {name: value for name, value in kwargs.items() if name != "generator"}
    words = (
        torch.__version__, torch.backends.cpu.get_cpu_capability(), func.__qualname__, tuple(target.shape),
        str(target.dtype), tuple(args), tuple(given.items()),
    )  # fmt: skip
    return hashlib.blake2b(before.numpy().tobytes() + repr(words).encode(), digest_size=16).hexdigest()


def _draw_apart(
    func: Callable[..., Any], values: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], before: Tensor
) -> None:
    """Draw values from a generator of their own that begins in a given state."""
    generator = torch.Generator()
    generator.set_state(before)
    with torch.no_grad():
        func(values, *args, **{**kwargs, "generator": generator})


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
