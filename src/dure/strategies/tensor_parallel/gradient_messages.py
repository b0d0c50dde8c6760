"""Messages in which gradients of many parameters go over a group together."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dure.comm.buckets import as_gradient_of


def exchange_gradients(messages: Iterable[list[nn.Parameter]], exchange: Callable[[Tensor], None]) -> None:
    """Apply a collective to gradients, on one vector for each list of parameters."""
    for parameters in messages:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        message = torch.cat([gradient.reshape(-1) for gradient in gradients])
        exchange(message)
        parts = message.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = as_gradient_of(parameter, part)


def bytes_of(messages: list[list[nn.Parameter]]) -> int:
    """Return the bytes of lists of parameters."""
    return sum(parameter.numel() * parameter.element_size() for message in messages for parameter in message)


def messages_of(parameters: list[nn.Parameter], most_bytes: int) -> Iterable[list[nn.Parameter]]:
    """Yield the parameters in lists of one dtype and about `most_bytes` bytes."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        message: list[nn.Parameter] = []
        for parameter in same:
            message.append(parameter)
            if sum(p.numel() * p.element_size() for p in message) >= most_bytes:
                yield message
                message = []
        if message:
            yield message
