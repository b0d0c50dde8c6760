"""Observer of a script's steps in one rank: what it fetches, its gradients before each step and its weights after it.

The script is unchanged. What it computes is not, if a proof asks for float64, or for the batches of other ranks: then
models and batches are converted, and each fetch gives the joined batches of the recorded ranks.
"""

import functools
import hashlib
import os
import random
import sys
import sysconfig
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, Subset

from dure.errors import Misuse
from dure.process.context import Place
from dure.scripts.prove.feeding import Batches, shaped
from dure.scripts.prove.recording import (
    CannotJoin,
    Fetch,
    Loader,
    Order,
    Recording,
    Step,
    plain_batch,
    recording_path,
    save,
    whole,
)
from dure.torchcompat.script_calls import FetchHooks, observe_backwards, observe_replicas, take_part_in_fetches

_SEED = 0
_INSTALLED = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
"""Folders of code that is not the script's."""
_END_SECONDS = 30.0
"""Seconds for which a rank that has seen enough waits for the others, which may still need its connections."""
_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)
_WRAPPING = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def begin(folder: str, place: Place) -> Callable[[], None]:
    """Observe this process from now on; return a function that writes the recording at its end."""
    observer = Observer(Path(folder), place.rank.rank, place.rank.world_size)
    observer.install()
    return observer.write


class Observer:
    """Observer of this process."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._order = Order.read(folder)
        self._pid = os.getpid()
        self.recording = Recording(rank=rank, world_size=world_size)
        self._batches = None if self._order.fed_from is None else Batches(Path(self._order.fed_from))
        self._loaders: dict[str, int] = {}
        self._lines: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._data: list[Any] = []
        self._data_by_line: dict[str, list[Any]] = {}
        self._shapes: dict[int, Any] = {}
        """First batch of each loader."""
        self._passes: list[int] = []
        self._since_backward: list[Fetch] = []
        self._backwards_in_step = 0
        self._iterators: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._depth = 0
        """Number of modules called within each other."""
        self._stepping = 0
        """Number of optimisers that step within each other, as a wrapper's."""
        self._gradients: dict[str, Any] = {}
        self._losses: list[float] = []
        self._loss_lines: list[str] = []
        self._random_state: Any = None

    def install(self) -> None:
        """Observe from now on."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        # each rank draws other numbers, as without us; one process draws those of rank 0 before its first batch
        seed = int.from_bytes(os.urandom(4), "little") if self._batches is None else self._batches.seed
        self.recording.seed = seed
        _seed_everything(seed)
        self._write_before_exit()
        if self._order.is_float64:
            self._compute_in_float64()
        if not self._order.has_dropout:
            _leave_out_dropout()
        torch.multiprocessing.spawn = _refuse_to_spawn
        self._watch_loaders()
        take_part_in_fetches(FetchHooks(self._begin_pass, self._index, self._fetch))
        observe_backwards(self._note_loss, lambda: None)
        observe_replicas(lambda replica: self.recording.wrappers.append(type(replica).__name__))
        register_module_forward_pre_hook(self._enter_module)
        register_module_forward_hook(self._leave_module, always_call=True)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))
        create = torch.optim.Optimizer.__init__

        @functools.wraps(create)
        def creating(optimizer: Any, *args: Any, **settings: Any) -> None:
            create(optimizer, *args, **settings)
            optimizer.__dict__.setdefault("_made_at", line_of_script())

        torch.optim.Optimizer.__init__ = creating  # type: ignore[method-assign, assignment]

    def _write_before_exit(self) -> None:
        """Write the recording when the script ends by `os._exit`, too."""
        leave = os._exit

        def leaving(status: int) -> NoReturn:
            self.write()
            leave(status)

        os._exit = leaving
        self._leave = leave

    def write(self) -> None:
        """Write the recording."""
        if os.getpid() != self._pid:
            return
        save(self.recording, recording_path(self._folder, self.recording.rank))

    # data

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
        if key not in self._loaders:
            number = len(self.recording.loaders)
            if self._batches is not None:
                number = self._batches.number_of(key, {*self._loaders.values()})
            self._loaders[key] = number
            while len(self.recording.loaders) <= number:
                self.recording.loaders.append(self._described(loader, key))
                self._passes.append(0)
        return self._loaders[key]

    def _watch_loaders(self) -> None:
        create, length = DataLoader.__init__, DataLoader.__len__

        @functools.wraps(create)
        def creating(loader: Any, *args: Any, **settings: Any) -> None:
            self._lines.setdefault(loader, line_of_script())
            create(loader, *args, **settings)
            self._number_of_data(loader.dataset)
            self._key_of(loader)  # by creation: ranks may begin to read in another order

        @functools.wraps(length)
        def measuring(loader: Any) -> int:
            own = length(loader)
            if os.getpid() != self._pid:
                return own
            data = self._number_of_data(loader.dataset)
            known = own if self._batches is None else self._batches.length(data, own)
            self.recording.lengths[data] = known
            return known

        DataLoader.__init__, DataLoader.__len__ = creating, measuring  # type: ignore[method-assign, assignment]

    def _number_of_data(self, data: Any) -> int:
        for number, known in enumerate(self._data):
            if known is data:
                return number
        self._data.append(data)
        return len(self._data) - 1

    def _begin_pass(self, iterator: Any, loader: Any) -> None:
        number = self._number_of_loader(loader)
        before = self._iterators.get(iterator)
        # work that loader processes were given while the iterator was made
        waiting = before.indices if before is not None and before.loader < 0 else deque[Any]()
        self._iterators[iterator] = _Pass(number, self._passes[number], waiting, loader.dataset)
        self._passes[number] += 1

    def _described(self, loader: Any, key: str) -> Loader:
        sampler: Any = getattr(loader, "sampler", None)
        name, data = type(sampler).__name__, loader.dataset
        is_shuffled = None
        if hasattr(sampler, "shuffle"):
            is_shuffled = bool(sampler.shuffle)
        elif name in ("RandomSampler", "SequentialSampler"):
            is_shuffled = name == "RandomSampler"
        has_length = not isinstance(data, IterableDataset) and hasattr(data, "__len__")
        return Loader(
            key=key,
            line=self._lines.get(loader, ""),
            num_samples=len(data) if has_length else None,
            is_part=isinstance(data, Subset),
            sampler=name,
            is_shuffled=is_shuffled,
        )

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
            step=self.recording.num_steps,
        )
        run.position += 1
        self.recording.fetches.append(fetch)
        self._since_backward.append(fetch)
        if self._batches is not None:
            joined = self._batches.joined(fetch)  # raises StopIteration where no rank had more
            if run.loader not in self._shapes:
                with suppress(StopIteration):  # it may have no batch of its own
                    self._shapes[run.loader] = own()  # for the types of its containers
            return self._converted(shaped(self._shapes.get(run.loader), joined))
        batch = own()
        index = run.indices.popleft() if run.indices else None
        fetch.size = size_of(batch)
        self._probe(run.loader, run.data)
        if isinstance(index, list) and all(isinstance(each, int | np.integer) for each in index):
            fetch.samples = _resolved([int(each) for each in index], run.data)
        elif isinstance(index, int):
            fetch.samples = _resolved([index], run.data)
        else:
            fetch.samples = digests(batch, fetch.size)
        if self.recording.num_steps < self._order.num_steps:
            try:
                fetch.batch = plain_batch(batch)
            except CannotJoin as error:
                self.recording.problems.append(str(error))
        self._random_state = _random_state()
        return self._converted(batch)

    def _probe(self, number: int, data: Any) -> None:
        """Read a few samples twice, with the same random numbers: do ranks have the same data, and is it repeatable?"""
        described = self.recording.loaders[number]
        if described.probes is not None or not described.num_samples:
            return
        places = sorted({0, described.num_samples // 2, described.num_samples - 1})
        states = random.getstate(), np.random.get_state()
        found: list[list[str]] = []
        with torch.random.fork_rng(devices=()):
            try:
                for _ in range(2):
                    _seed_everything(_SEED)
                    found.append([digest for place in places for digest in digests([data[place]], 1)])
                    time.sleep(0.002)  # a clock has another time then
            except Exception:
                return
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])
        described.probes = found[0]
        self.recording.is_repeatable = self.recording.is_repeatable is not False and found[0] == found[1]

    def _converted(self, batch: Any) -> Any:
        if not self._order.is_float64:
            return batch
        return pytree.tree_map(lambda each: each.double() if _is_floating(each) else each, batch)

    # models

    def _compute_in_float64(self) -> None:
        torch.set_default_dtype(torch.float64)
        autocast = torch.autocast.__init__

        @functools.wraps(autocast)
        def without(self: Any, *args: Any, **settings: Any) -> None:
            autocast(self, *args, **{**settings, "enabled": False})

        torch.autocast.__init__ = without  # type: ignore[method-assign]
        if torch.distributed.is_available():
            kind = torch.nn.parallel.DistributedDataParallel
            create = kind.__init__

            @functools.wraps(create)
            def creating(self: Any, module: nn.Module, *args: Any, **settings: Any) -> None:
                create(self, module.double(), *args, **settings)

            kind.__init__ = creating  # type: ignore[method-assign]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or os.getpid() != self._pid or any(module is each for each in self._models):
            return
        if not any(True for _ in module.parameters()):  # a loss
            return
        number = len(self._models)
        if self._order.is_float64 and any(p.dtype == torch.float32 for p in module.parameters()):
            module.double()
        if any(module is inner for known in self._models for inner in known.modules()):
            return
        self._models.append(module)
        if self._batches is not None:
            self._batches.give_weights(number, tensors_of(module))
        self.recording.initial |= {f"{number}.{name}": whole(tensor) for name, tensor in tensors_of(module).items()}
        self.recording.wrappers.append(type(module).__name__)
        names = {plain(name): each for name, each in module.named_modules()}
        self.recording.norms += [
            name
            for name, each in names.items()
            if isinstance(each, _NORMS) and not isinstance(each, nn.SyncBatchNorm) and each.training
        ]
        self.recording.dropouts += [
            name
            for name, each in names.items()
            if (isinstance(each, _DROPOUTS) and each.p > 0) or _is_rate(getattr(each, "dropout", None))
        ]

    def _leave_module(self, *_: Any) -> None:
        self._depth -= 1

    def _names(self, optimizer: Any) -> dict[int, str]:
        """Return the names of an optimiser's parameters by their identity."""
        known = {
            id(parameter): name if number == 0 else f"{number}.{name}"
            for number, model in reversed(list(enumerate(self._models)))
            for name, parameter in ((plain(name), parameter) for name, parameter in model.named_parameters())
        }
        return {
            id(parameter): known.get(id(parameter), f"parameter {place} of group {group}")
            for group, settings in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(settings["params"])
        }

    # steps

    def _note_loss(self, tensors: Any) -> None:
        if os.getpid() != self._pid:
            return
        if self._is_over():
            self._mark_trained()
            return
        if self._random_state is not None and _random_state() != self._random_state:
            self.recording.has_drawn = True
        self._mark_trained()
        self._backwards_in_step += bool(self._stepping)
        first = tensors if isinstance(tensors, Tensor) else None
        if first is not None and first.numel() == 1:
            self._losses.append(float(first.detach()))
        self._loss_lines.append(line_of_script())

    def _mark_trained(self) -> None:
        """Mark the batches from which this backward may come: the last one, and those of passes that go on."""
        if not self._since_backward:
            return
        ended = {(each.loader, each.epoch) for each in self._since_backward if each.samples is None}
        last = self._since_backward[-1]
        for each in self._since_backward:
            is_open = (each.loader, each.epoch) not in ended
            each.is_trained = each.has_gradients and (is_open or each is last)
        self._since_backward = [last] if last.samples is None else []

    def _before_step(self, optimizer: Any) -> None:
        self._stepping += 1
        if os.getpid() != self._pid or self._is_over():
            return
        self._backwards_in_step = 0
        self._gradients |= self._gradients_of(optimizer)

    def _gradients_of(self, optimizer: Any) -> dict[str, Any]:
        names = self._names(optimizer)
        return {
            names[id(parameter)]: whole(parameter.grad)
            for settings in optimizer.param_groups
            for parameter in settings["params"]
            if parameter.grad is not None
        }

    def _after_step(self, optimizer: Any) -> None:
        self._stepping -= 1
        if self._stepping or os.getpid() != self._pid:
            return
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)
            self.recording.optimizer_lines.append(optimizer.__dict__.get("_made_at", ""))
        if not self._is_over():
            self._record_step(optimizer)
        self.recording.rates.append(_rates(optimizer))
        self.recording.weight_sums.append(_sum_of_weights(optimizer))
        self.recording.num_steps += 1
        self._losses, self._loss_lines, self._gradients = [], [], {}
        if self.recording.num_steps >= self._order.num_sample_steps or (self._batches is not None and self._is_over()):
            self._end()

    def _record_step(self, optimizer: Any) -> None:
        names = self._names(optimizer)
        if self._backwards_in_step:  # of a closure
            self._gradients = self._gradients_of(optimizer)
        number = next(place for place, each in enumerate(self._optimizers) if each is optimizer)
        self.recording.steps.append(
            Step(
                optimizer=number,
                line=line_of_script(),
                rates=_rates(optimizer),
                losses=self._losses,
                loss_lines=self._loss_lines,
                gradients=self._gradients,
                weights={
                    names[id(parameter)]: whole(parameter)
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                },
                buffers={
                    plain(name) if not place else f"{place}.{plain(name)}": whole(buffer)
                    for place, model in enumerate(self._models)
                    for name, buffer in model.named_buffers()
                },
            )
        )

    def _is_over(self) -> bool:
        return self.recording.num_steps >= self._order.num_steps

    def _end(self) -> NoReturn:
        """End this rank: all that is compared has been seen. The others may still need its connections."""
        self.write()
        deadline = time.monotonic() + _END_SECONDS
        paths = [recording_path(self._folder, rank) for rank in range(self.recording.world_size)]
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.01)
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave(0)


class _Pass:
    """Pass over the data of a loader."""

    def __init__(self, loader: int, epoch: int, indices: deque[Any], data: Any) -> None:
        self.loader, self.epoch, self.indices, self.data = loader, epoch, indices, data
        self.position = 0


def line_of_script() -> str:
    """Return as `file:line` the innermost line of the script's folder, or else one that is not of an installation."""
    frame: Any = sys._getframe(1)
    folder = str(Path(getattr(sys.modules["__main__"], "__file__", None) or ".").absolute().parent)
    elsewhere = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(("<", *_INSTALLED)) and "site-packages" not in path:
            line = f"{path}:{frame.f_lineno}"
            if str(Path(path).absolute()).startswith(folder):
                return line
            elsewhere = elsewhere or line
        frame = frame.f_back
    return elsewhere


def plain(name: str) -> str:
    """Return the name of a parameter without those of wrappers."""
    for wrapping in _WRAPPING:
        name = name.replace(wrapping, "")
    return name


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers of a model by their names without those of wrappers."""
    both = [*module.named_parameters(), *module.named_buffers()]
    return {plain(name): tensor for name, tensor in both}


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


def _rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _sum_of_weights(optimizer: Any) -> float:
    weights = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    return sum(float(weight.double().sum()) for weight in weights if not isinstance(weight, DTensor))


def _refuse_to_spawn(*_: Any, **__: Any) -> NoReturn:
    raise Misuse(
        "the script starts its ranks by itself (torch.multiprocessing.spawn), which are not seen: let it take the rank "
        "from RANK and WORLD_SIZE, as under torchrun"
    )


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and value > 0


def _resolved(indices: list[int], data: Any) -> list[int]:
    """Return the indices in the data set of which another may be a part."""
    while isinstance(data, Subset):
        indices, data = [int(data.indices[each]) for each in indices], data.dataset
    return indices


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _random_state() -> tuple[Any, ...]:
    numbers: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numbers[1].tobytes(), numbers[2], random.getstate()


def _leave_out_dropout() -> None:
    """Let every dropout return its input."""

    def same(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(nn.functional, name, same)
    torch.dropout = same
    attention = nn.functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any) -> Any:
        return attention(query, key, value, attn_mask, **rest)

    nn.functional.scaled_dot_product_attention = without  # type: ignore[assignment]
