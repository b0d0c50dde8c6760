"""Matching of requests by name, without processes."""

import pytest

from dure.compat.horovod.engine.coordinator import Coordinator, Limits
from dure.compat.horovod.engine.requests import AVERAGE, SUM, Request, Response


def _request(name: str, *, kind: str = "allreduce", rows: int = 4, op: int = SUM, dtype: str = "float32") -> Request:
    return Request(name=name, kind=kind, dtypes=(dtype,), shapes=((rows,),), op=op)


def _coordinator(num_ranks: int = 2, **limits: float) -> Coordinator:
    return Coordinator(["host"] * num_ranks, Limits(**limits))  # type: ignore[arg-type]


def _names(responses: list[Response]) -> list[tuple[str, ...]]:
    return [response.names for response in responses]


def test_requests_when_only_some_ranks_have_asked_then_nothing_starts() -> None:
    coordinator = _coordinator(3)
    coordinator.add(0, _request("a"))
    coordinator.add(2, _request("a"))
    assert coordinator.take() == []
    coordinator.add(1, _request("a"))
    assert _names(coordinator.take()) == [("a",)]


def test_requests_when_ranks_ask_in_different_orders_then_the_last_request_decides() -> None:
    coordinator = _coordinator(2, fusion_bytes=0)
    for rank, name in ((0, "a"), (0, "b"), (1, "b"), (1, "a")):
        coordinator.add(rank, _request(name))
    assert _names(coordinator.take()) == [("b",), ("a",)]


def test_requests_when_small_then_those_that_agree_are_fused_up_to_the_limit() -> None:
    coordinator = _coordinator(1, fusion_bytes=40)  # two of 16 bytes
    for name, op in (("a", SUM), ("b", AVERAGE), ("c", SUM), ("d", SUM)):
        coordinator.add(0, _request(name, op=op))
    coordinator.add(0, _request("e", dtype="float64", rows=2))
    assert _names(coordinator.take()) == [("a", "c"), ("b",), ("d",), ("e",)]


def test_gathers_when_fused_then_the_lengths_of_each_rank_are_in_the_order_of_names() -> None:
    coordinator = _coordinator()
    for rank in (0, 1):
        for name in ("a", "b"):
            coordinator.add(rank, _request(name, kind="allgather", rows=10 * rank + (name == "b")))
    (response,) = coordinator.take()
    assert (response.names, response.sizes) == (("a", "b"), ((0, 1), (10, 11)))


def test_requests_when_a_rank_has_joined_then_the_others_go_on_and_it_gets_their_shapes() -> None:
    coordinator = _coordinator()
    coordinator.add(1, _request("a"))
    coordinator.add(0, Request(name="join.all", kind="join"))
    coordinator.add(1, _request("b"))
    (response,) = coordinator.take()
    assert (response.names, [model.name for model in response.models]) == (("a", "b"), ["a", "b"])
    coordinator.add(1, Request(name="join.all", kind="join"))
    (response,) = coordinator.take()
    assert (response.kind, response.value) == ("join", 1)


def test_stall_when_a_rank_is_missing_then_its_tensor_and_the_rank_are_named_once() -> None:
    coordinator = _coordinator(3, stall_seconds=60, shutdown_seconds=90)
    coordinator.add(1, _request("late"))
    assert coordinator.stalled(0.0) == ([], None)
    long_after = 1e12
    lines, reason = coordinator.stalled(long_after)
    assert lines == ["late (missing ranks: 0, 2)"]
    assert reason is not None
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in reason
    assert coordinator.stalled(long_after)[0] == []


def test_ranks_when_each_waits_for_what_others_did_not_ask_for_then_all_of_it_fails() -> None:
    coordinator = _coordinator()
    coordinator.add(0, _request("allreduce.x"))
    coordinator.add(1, _request("broadcast.x", kind="broadcast"))
    coordinator.note_wait(0, (0, "allreduce.x"))
    coordinator.fail_if_none_can_go_on()
    assert coordinator.take() == []
    coordinator.note_wait(1, (0, "broadcast.x"))
    coordinator.fail_if_none_can_go_on()
    errors = [str(response.error) for response in coordinator.take()]
    assert [error.partition(":")[0] for error in errors] == ["Mismatched operations"] * 2
    assert not coordinator.is_waiting


@pytest.mark.parametrize(
    "response",
    [
        Response(kind="barrier", names=("a",)),
        Response(kind="allgather", names=("a", "b"), process_set=2, sizes=((1, 2), (0, 3))),
        Response(kind="allreduce", names=("a",), error="no", models=(_request("a"),), has_own_devices=True),
        Response(kind="add_process_set", names=("a",), value=0, members=(0, 1)),
    ],
)
def test_response_when_sent_then_is_the_same(response: Response) -> None:
    assert Response.from_json(response.to_json()) == response
