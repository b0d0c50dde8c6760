"""Segments of a vector: how algorithms cut it, reduce two into one, and pipeline long ones."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dure.comm.algorithms.base import ReduceOp
from dure.comm.algorithms.wire import PointToPoint, Transfer
from dure.data.partition import shares

SEGMENT_BYTES = 4 * 2**20
"""Maximum size of the equal segments of a long message; the next one is in flight while one is added up.

Smaller segments cost more than they hide: a handshake and four thread switches each, about 0.2 ms of CPU time with
gloo; see benchmarks/all_reduce.py.
"""

WINDOW = 4
"""Maximum segments in flight at once."""


def shard_bounds(num_elements: int, num_shards: int) -> list[int]:
    """Return the start of each shard of a vector, and the end; sizes differ by at most one, the first are larger."""
    bounds = [0]
    for size in shares(num_elements, num_shards):
        bounds.append(bounds[-1] + size)
    return bounds


def segment_length(num_elements: int, element_bytes: int) -> int:
    """Return the elements per segment if a message is cut into equal ones; at least 1."""
    num_segments = max(1, -(-num_elements * element_bytes // SEGMENT_BYTES))
    return max(1, -(-num_elements // num_segments))


def window_for(num_segments: int, num_sources: int = 1) -> int:
    """Return the number of segments in flight: fewer if each comes from several sources at once."""
    return min(max(1, WINDOW // max(1, num_sources)), num_segments)


def reduce_into(target: Tensor, incoming: Tensor, op: ReduceOp) -> None:
    """Add `incoming` to `target`, or take the larger values. A mean is a sum until `finish_mean`.

    Half-precision values are added in float32, and every sum is rounded to the vector's dtype, as in torch's own
    `add_`.
    """
    if op == "max":
        torch.maximum(target, incoming, out=target)
    else:
        target.add_(incoming)


def finish_mean(reduced: Tensor, op: ReduceOp, world_size: int) -> None:
    """Divide a sum over all ranks by the world size if the op is a mean; integers are truncated towards zero."""
    if op != "mean":
        return
    if reduced.dtype.is_floating_point or reduced.dtype.is_complex:
        reduced.div_(world_size)
    else:
        reduced.div_(world_size, rounding_mode="trunc")


def in_window(num_transfers: int, window: int, start: Callable[[int], Transfer], finish: Callable[[int], None]) -> None:
    """Run numbered transfers in order with at most `window` of them in flight.

    Transfer `n` starts after `n - window` has finished, so it may send what that one received.

    Args:
        num_transfers: Number of transfers.
        window: Maximum transfers in flight; at least 1 if there are any transfers.
        start: Starts a transfer, given its number.
        finish: Processes what a completed transfer has received, given its number.
    """
    under_way: deque[Transfer] = deque()
    for number in range(num_transfers + window):
        if number >= window:
            under_way.popleft().wait()
            finish(number - window)
        if number < num_transfers:
            under_way.append(start(number))


def relay(
    wire: PointToPoint, vector: Tensor, *, sources: Sequence[int], targets: Sequence[int], op: ReduceOp | None
) -> None:
    """Receive a vector from each source and send the result to each target, segment by segment.

    Communication: N elements to each target, blocking.

    Args:
        wire: Wire of the ranks.
        vector: (N,) contiguous, modified in place.
        sources: Peers to receive from. If there are none, the vector is sent unchanged.
        targets: Peers to send to.
        op: Reduction of received vectors into the vector, in the order of `sources`; None to overwrite it.
    """
    length = segment_length(vector.numel(), vector.element_size())
    pieces = vector.split(length) if vector.numel() else ()
    window = window_for(len(pieces), len(sources))
    room = wire.scratch(vector, length * window * len(sources)) if op else vector
    rooms = room.view(window, len(sources), -1) if op and sources and pieces else None
    sending: deque[Transfer] = deque()

    def landing(number: int, source: int) -> Tensor:
        piece = pieces[number]
        return piece if rooms is None else rooms[number % window, source, : piece.numel()]

    def start(number: int) -> Transfer:
        return wire.start([], [(landing(number, source), peer) for source, peer in enumerate(sources)])

    def finish(number: int) -> None:
        if op is not None:
            for source in range(len(sources)):
                reduce_into(pieces[number], landing(number, source), op)
        sending.append(wire.start([(pieces[number], peer) for peer in targets], []))
        if len(sending) > window:
            sending.popleft().wait()

    in_window(len(pieces), window, start, finish)
    for transfer in sending:
        transfer.wait()


def swap(wire: PointToPoint, outgoing: Tensor, target: Tensor, peer: int, op: ReduceOp | None) -> None:
    """Exchange two parts of a vector with one peer, segment by segment.

    Communication: the elements of `outgoing`, blocking.

    Args:
        wire: Wire of the ranks.
        outgoing: (M,) contiguous.
        target: (K,) contiguous; receives or reduces what the peer sends.
        peer: Rank to exchange with.
        op: Reduction into the target; None to overwrite it.
    """
    longest = max(outgoing.numel(), target.numel())  # the same on both sides
    length = segment_length(longest, target.element_size())
    num_segments = -(-longest // length)
    window = window_for(num_segments)
    room = wire.scratch(target, length * window) if op else target

    def landing(number: int) -> tuple[Tensor, Tensor]:
        piece = target[number * length : (number + 1) * length]
        first = number % window * length
        return piece, piece if op is None else room[first : first + piece.numel()]

    def start(number: int) -> Transfer:
        return wire.start([(outgoing[number * length : (number + 1) * length], peer)], [(landing(number)[1], peer)])

    def finish(number: int) -> None:
        if op is not None:
            reduce_into(*landing(number), op)

    in_window(num_segments, window, start, finish)
