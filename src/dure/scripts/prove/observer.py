"""Observer of a script's steps in one rank: what it fetches, its gradients before each step and its weights after it.

The script is unchanged. What it computes is not, if a proof asks for float64, or for the batches of other ranks: then
models and batches are converted, and each fetch gives the joined batches of the recorded ranks.
"""

import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dure.errors import Misuse
from dure.process.context import Place
from dure.scripts.prove.checkpoints import keep_checkpoints
from dure.scripts.prove.feeding import Batches
from dure.scripts.prove.loaders import Loaders
from dure.scripts.prove.naming import line_of_script, plain, tensors_of
from dure.scripts.prove.neutral import NORMS, leave_out_dropout, leave_out_statistics, observe_dropout
from dure.scripts.prove.recording import Clip, Metric, Order, Recording, Step, partial_path, recording_path, save, whole
from dure.scripts.prove.sketches import sketch
from dure.torchcompat.script_calls import observe_backwards, observe_replicas
from dure.torchcompat.tensors import FlatShard, flat_shards

_END_SECONDS = 30.0
"""Seconds for which a rank that has seen enough waits for the others, which may still need its connections."""
_QUIET_SECONDS = 3.0
"""Seconds without a step or a fetch after which a rank writes what it has: it may be ended by force."""
_TIMES_LONGEST = 2.0
"""Factor on the longest time between steps so far, where that is more; all that was recorded is written each time."""


def begin(folder: str, place: Place) -> Callable[[], None]:
    """Observe this process from now on; return a function that writes the recording at its end."""
    observer = Observer(Path(folder), place.rank.rank, place.rank.world_size)
    observer.install()
    return observer.write


class Observer:
    """Observer of this process."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._order = order = Order.read(folder)
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._writing = threading.Lock()
        self.recording = Recording(rank=rank, world_size=world_size)
        self._batches = None if order.fed_from is None else Batches(Path(order.fed_from), in_turns=order.in_turns)
        self._loaders = Loaders(self.recording, order, self._batches, self._end)
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._shards: dict[int, FlatShard] = {}
        self._norms: set[nn.Module] = set()
        self._depth = 0
        """Number of modules called within each other."""
        self._stepping = 0
        """Number of optimisers that step within each other, as a wrapper's."""
        self._gradients: dict[str, Any] = {}
        self._starts: dict[str, Any] = {}
        self._called: set[int] = set()
        """Numbers of the models that were called since the last step."""
        self._backwards_in_step = 0
        self._losses: list[float] = []
        self._loss_lines: list[str] = []

    def install(self) -> None:
        """Observe from now on."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        # each rank draws other numbers, as without us; one process draws those of rank 0 before its first batch
        seed = int.from_bytes(os.urandom(4), "little") if self._batches is None else self._batches.seed
        self.recording.seed = seed
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self._write_before_exit()
        keep_checkpoints(self._folder, self.recording.rank)
        if self._order.is_float64:
            self._compute_in_float64()
        if self._order.has_dropout:
            observe_dropout(self._note_dropout)
        else:
            leave_out_dropout()
        if not self._order.has_statistics:
            leave_out_statistics()
        torch.multiprocessing.spawn = _refuse_to_spawn
        self._loaders.install()
        observe_backwards(self._note_loss, lambda: None)
        observe_replicas(lambda replica: self.recording.wrappers.append(type(replica).__name__))
        register_module_forward_pre_hook(self._enter_module)
        register_module_forward_hook(self._leave_module, always_call=True)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))
        self._watch_clipping()
        self._watch_metrics()
        create = torch.optim.Optimizer.__init__

        @functools.wraps(create)
        def creating(optimizer: Any, *args: Any, **settings: Any) -> None:
            create(optimizer, *args, **settings)
            optimizer.__dict__.setdefault("_made_at", line_of_script())

        torch.optim.Optimizer.__init__ = creating  # type: ignore[method-assign, assignment]
        threading.Thread(target=self._watch_time, name="dure prove", daemon=True).start()

    def _watch_clipping(self) -> None:
        clip = nn.utils.clip_grad_norm_

        @functools.wraps(clip)
        def clipping(*args: Any, **settings: Any) -> Any:
            norm = clip(*args, **settings)
            if os.getpid() == self._pid and not self._is_over():
                value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                self.recording.clips.append(Clip(step=self.recording.num_steps, line=line_of_script(), norm=value))
            return norm

        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clipping

    def _watch_metrics(self) -> None:
        kind = torch.optim.lr_scheduler.ReduceLROnPlateau
        step = kind.step

        @functools.wraps(step)
        def stepping(schedule: Any, metrics: Any, *args: Any, **settings: Any) -> None:
            if os.getpid() == self._pid:
                found = Metric(step=self.recording.num_steps, line=line_of_script(), value=float(metrics))
                self.recording.metrics.append(found)
            step(schedule, metrics, *args, **settings)

        kind.step = stepping  # type: ignore[method-assign, assignment]

    # end

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
        self.recording.end = self.recording.end or "script"
        with self._writing:
            save(self.recording, recording_path(self._folder, self.recording.rank))

    def _watch_time(self) -> None:
        """Write what there is when the script is quiet, and end this rank when its time is over."""
        path, written = partial_path(self._folder, self.recording.rank), (-1, -1)
        seen, since, longest = written, self._began, 0.0
        while (now := time.monotonic()) - self._began < self._order.most_seconds:
            progress = self.recording.num_steps, len(self.recording.fetches)
            if progress != seen:
                longest = max(longest, now - since) if seen[0] > 0 else 0.0  # the first step may compile
                seen, since = progress, now
            elif seen != written and now - since > max(_QUIET_SECONDS, _TIMES_LONGEST * longest):
                with self._writing, suppress(OSError, RuntimeError):  # the script may go on meanwhile
                    save(self.recording, path)
                written = seen
            time.sleep(0.2)
        self.recording.end = "time"
        with suppress(OSError, RuntimeError):
            self.write()
        self._leave(0)

    def _end(self) -> NoReturn:
        """End this rank: all that is compared has been seen. The others may still need its connections."""
        self.recording.end = "steps"
        self.write()
        deadline = time.monotonic() + _END_SECONDS
        paths = [recording_path(self._folder, rank) for rank in range(self.recording.world_size)]
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.01)
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave(0)

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
        if os.getpid() != self._pid:
            return
        if isinstance(module, NORMS) and module not in self._norms:
            self._note_norm(module)
        if self._depth > 1:
            return
        number = next((place for place, each in enumerate(self._models) if each is module), None)
        if number is None:
            number = self._meet_model(module)
        if number is not None and number not in self._called and torch.is_grad_enabled() and self._optimizers:
            self._called.add(number)
            self._starts |= self._sketches_of(module, number)

    def _meet_model(self, module: nn.Module) -> int | None:
        """Note a model at its first call; return its number, or None for a loss or a part of a known model."""
        if not any(True for _ in module.parameters()):
            return None
        number = len(self._models)
        shards = flat_shards(module)
        if self._order.is_float64 and not shards and any(p.dtype == torch.float32 for p in module.parameters()):
            module.double()
        if any(module is inner for known in self._models for inner in known.modules()):
            return None
        self._models.append(module)
        self._shards |= shards
        if self._batches is not None:
            self._batches.give_weights(number, tensors_of(module))
        self.recording.initial |= {
            f"{number}.{name}": found
            for name, tensor in tensors_of(module).items()
            if (found := self._whole(tensor, tensor)) is not None
        }
        self.recording.wrappers.append(type(module).__name__)
        for each in module.modules():
            self._note_norm(each)
            if isinstance(each, nn.RNNBase) and each.dropout > 0 and each.num_layers > 1 and each.training:
                self._note_dropout()
                if not self._order.has_dropout:
                    each.dropout = 0.0
        return number

    def _note_norm(self, module: nn.Module) -> None:
        """Note a module that computes statistics of a batch, from its first such call on."""
        if not (isinstance(module, NORMS) and module.training and torch.is_grad_enabled()):
            return
        if isinstance(module, nn.SyncBatchNorm) or not self._order.has_statistics or module in self._norms:
            return
        for model in self._models:
            for name, each in model.named_modules():
                if each is module:
                    self._norms.add(module)
                    self.recording.norms.append(plain(name))
                    return

    def _leave_module(self, *_: Any) -> None:
        self._depth -= 1

    def _note_dropout(self) -> None:
        if not self.recording.dropouts and torch.is_grad_enabled() and os.getpid() == self._pid:
            self.recording.dropouts.append(line_of_script())

    def _whole(self, parameter: Any, values: Any) -> Tensor | None:
        """Return a copy of a parameter or its gradient, the whole one if it is divided over the ranks."""
        shard = self._shards.get(id(parameter))
        if shard is None:
            return None if values is None else whole(values)
        found = shard.whole(values)
        return None if found is None else whole(found)

    def _sketches_of(self, module: nn.Module, number: int) -> dict[str, Tensor]:
        """Return sketches of the weights of a model, by the names that they have in steps."""
        found = {}
        for name, parameter in module.named_parameters():
            shard = self._shards.get(id(parameter))
            weight = parameter if shard is None else shard.whole(parameter)
            if weight is not None:
                found[plain(name) if number == 0 else f"{number}.{plain(name)}"] = sketch(weight)
        return found

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
        if not self._is_over() and self._loaders.has_drawn():
            self.recording.has_drawn = True
        self._loaders.end_batch()
        self._loaders.mark_trained()
        self._backwards_in_step += bool(self._stepping)
        first = tensors if isinstance(tensors, Tensor) else None
        if first is not None and first.numel() == 1:
            self._losses.append(float(first.detach()))
        self._loss_lines.append(line_of_script())

    def _before_step(self, optimizer: Any) -> None:
        self._stepping += 1
        if os.getpid() != self._pid:
            return
        self._backwards_in_step = 0
        self._gradients |= self._tensors(optimizer, of_gradients=True)

    def _tensors(self, optimizer: Any, *, of_gradients: bool) -> dict[str, Tensor]:
        """Return the gradients or weights of an optimiser's parameters, as sketches after the compared steps."""
        names, found = self._names(optimizer), {}
        for settings in optimizer.param_groups:
            for parameter in settings["params"]:
                values = parameter.grad if of_gradients else parameter
                shard = self._shards.get(id(parameter))
                if shard is not None:
                    values = shard.whole(values)
                if values is not None:
                    found[names[id(parameter)]] = sketch(values) if self._is_over() else whole(values)
        return found

    def _after_step(self, optimizer: Any) -> None:
        self._stepping -= 1
        if self._stepping or os.getpid() != self._pid:
            return
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)
            self.recording.optimizer_lines.append(optimizer.__dict__.get("_made_at", ""))
        self._record_step(optimizer)
        self.recording.num_steps += 1
        self._losses, self._loss_lines, self._gradients = [], [], {}
        self._starts, self._called = {}, set()
        if self.recording.num_steps >= self._order.num_sample_steps:
            self._end()

    def _record_step(self, optimizer: Any) -> None:
        if self._backwards_in_step:  # of a closure
            self._gradients = self._tensors(optimizer, of_gradients=True)
        number = next(place for place, each in enumerate(self._optimizers) if each is optimizer)
        buffers = {}
        if not self._is_over():
            buffers = {
                plain(name) if not place else f"{place}.{plain(name)}": whole(buffer)
                for place, model in enumerate(self._models)
                for name, buffer in model.named_buffers()
            }
        self.recording.steps.append(
            Step(
                optimizer=number,
                line=line_of_script(),
                rates=_rates(optimizer),
                losses=self._losses,
                loss_lines=self._loss_lines,
                gradients=self._gradients,
                weights=self._tensors(optimizer, of_gradients=False),
                buffers=buffers,
                starts=self._starts,
                is_sketch=self._is_over(),
            )
        )

    def _is_over(self) -> bool:
        return self.recording.num_steps >= self._order.num_steps


def _rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _refuse_to_spawn(*_: Any, **__: Any) -> NoReturn:
    raise Misuse(
        "the script starts its ranks by itself (torch.multiprocessing.spawn), which are not seen: let it take the rank "
        "from RANK and WORLD_SIZE, as under torchrun"
    )
