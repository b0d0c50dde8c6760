"""Buffers with the same name, dtype and shape on all ranks: a model may register or grow others by a rank's samples."""

from torch import Tensor, nn

from dure.comm.groups import Group


def common_buffers(model: nn.Module, group: Group) -> list[Tensor]:
    """Return the buffers, in one order, that every rank has with the same name, dtype and shape.

    Communication: one gathered JSON message of about 60 bytes per buffer.
    """
    own = {name: buffer for name, buffer in model.named_buffers() if buffer.numel()}
    kinds = {name: [str(buffer.dtype), list(buffer.shape)] for name, buffer in own.items()}
    everyone = group.all_gather_json(kinds)
    return [own[name] for name, kind in everyone[0].items() if all(theirs.get(name) == kind for theirs in everyone)]


def broadcast_buffers(model: nn.Module, group: Group) -> None:
    """Send rank 0's buffers to all. Those that differ in shape, such as a table that has grown, are left unchanged.

    Communication: the message of `common_buffers`, and one broadcast for each buffer.
    """
    group.broadcast(common_buffers(model, group))
