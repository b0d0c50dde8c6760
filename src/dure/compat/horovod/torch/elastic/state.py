"""State of models, optimisers, samplers and objects."""

import copy
from typing import Any

import torch

from dure.compat.horovod.common.basics import rank
from dure.compat.horovod.common.elastic import ObjectState
from dure.compat.horovod.torch.elastic.sampler import ElasticSampler
from dure.compat.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Committed and restored part of a state: an object with a `state_dict`."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Return to the copy that was kept last."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the object, and keep a copy."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handler of models."""

    def sync(self) -> None:
        """Give all ranks rank 0's parameters and buffers, and keep a copy."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """Handler of optimisers."""

    def sync(self) -> None:
        """Give all ranks rank 0's state and options, and keep a copy."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class LRSchedulerStateHandler(StateHandler):
    """Handler of schedulers of the learning rate, which hold their optimiser: copies would change another one."""

    def sync(self) -> None:
        """Give all ranks rank 0's position, and keep a copy."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


class SamplerStateHandler(StateHandler):
    """Handler of samplers."""

    def sync(self) -> None:
        """Give all ranks rank 0's position, and keep a copy."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (torch.optim.lr_scheduler.ReduceLROnPlateau, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the handlers by the types of objects."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers by the types of objects."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """State of a training with PyTorch. Every keyword is an attribute."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Keep a copy of everything.

        Args:
            model: Model.
            optimizer: Optimiser.
            kwargs: Further models, optimisers, samplers and objects by their names.
        """
        given = {**kwargs, "model": model, "optimizer": optimizer}
        found = {name: _handler_of(value) for name, value in given.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        objects = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **objects)

    def save(self) -> None:
        """Keep a copy of everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the copy that was kept last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divide samplers among the ranks of a new start."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; of a new model, optimiser or sampler a copy is kept."""
        if name != "_handlers" and hasattr(self, "_handlers") and name in self._handlers and hasattr(self, name):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
