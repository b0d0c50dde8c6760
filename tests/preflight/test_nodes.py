"""Checks of what nodes have in common, and of the ways between them; those over a network are in `test_network.py`."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from dure.errors import Misuse
from dure.launch.nodes import rendezvous
from dure.launch.nodes.channel import Channel, HandshakeRefused
from dure.launch.nodes.member import Member
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.rendezvous import NodeSettings, join
from dure.preflight import node_pairs as pairs
from dure.preflight.all_checks import gather_long
from dure.preflight.host_facts import Interface
from dure.preflight.node_checks import (
    clock_check,
    device_check,
    folder_check,
    mtu_check,
    pair_checks,
    version_checks,
)
from dure.preflight.node_pairs import Attempt, try_pairs
from dure.preflight.node_records import record_of_node
from tests.preflight.facts import GOOD, host

SECRET = b"a secret of that length"
NAMES = ("node 0 (a, 10.0.0.1)", "node 1 (b, 10.0.0.2)")
MEMBERS = tuple(
    Member(node_rank=rank, host=letter, address=f"10.0.0.{rank + 1}", num_ranks=1) for rank, letter in enumerate("ab")
)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def three(tmp_path, monkeypatch) -> Iterator[list[Nodes]]:
    """Three launchers that have met, all on this host."""
    monkeypatch.setattr(rendezvous, "_LOOK_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    wanted = [
        NodeSettings(
            num_nodes=3,
            node_rank=rank,
            rendezvous=f"127.0.0.1:{port}",
            secret_file=tmp_path / "secret",
            timeout_seconds=10,
        )
        for rank in range(3)
    ]
    with ExitStack() as stack:
        yield [stack.enter_context(node) for node in at_once(*(lambda one=one: join(one, {}, 1) for one in wanted))]


def test_pairs_when_all_is_well_then_every_way_is_tried_once(three):
    found = at_once(*(lambda node=node: try_pairs(node, SECRET) for node in three))
    assert found[0] == found[1] == found[2]
    assert [(one.source, one.target) for one in found[0]] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(one.cause is None and 0 < one.round_trip_seconds < 1 for one in found[0])
    (told,) = pair_checks(found[0], three[0].members)
    assert told.status == "ok"
    assert told.seen.startswith("all 6 ways; the slowest, node ")


def test_pairs_when_a_clock_is_wrong_then_the_node_and_by_how_much_is_told(three):
    clocks = time.time, time.time, lambda: time.time() - 7.25
    found = at_once(*(lambda n=n, c=c: try_pairs(n, SECRET, clock=c) for n, c in zip(three, clocks, strict=True)))
    names = [str(member) for member in three[0].members]
    (told,) = clock_check(found[0], names)
    assert told.status == "warning"
    assert told.seen == f"the clock of {names[2]} is 7.25 s behind that of {names[0]}"
    assert told.pair == (names[0], names[2])


def test_pairs_when_one_knows_another_secret_then_the_ways_to_and_from_it_are_strange(three):
    secrets = SECRET, SECRET, b"another one of that length"
    found = at_once(*(lambda n=n, s=s: try_pairs(n, s) for n, s in zip(three, secrets, strict=True)))[0]
    assert {(one.source, one.target): one.cause for one in found} == {
        (0, 1): None, (1, 0): None,
        (0, 2): "stranger", (2, 0): "stranger", (1, 2): "stranger", (2, 1): "stranger",
    }  # fmt: skip


def test_pair_when_one_cannot_listen_then_the_others_are_told(three, monkeypatch):
    real = pairs.ChannelListener

    def refuse(family: int, address: Any, secret: bytes) -> Any:
        if secret != SECRET:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return real(family, address, secret)

    monkeypatch.setattr(pairs, "ChannelListener", refuse)
    secrets = SECRET, SECRET, b"by which it is told apart"
    found = at_once(*(lambda n=n, s=s: try_pairs(n, s) for n, s in zip(three, secrets, strict=True)))[0]
    closed = [(one.source, one.target, one.said) for one in found if one.cause == "closed"]
    assert closed == [(rank, 2, "Cannot assign requested address") for rank in (0, 1)]


def test_long_words_when_gathered_then_come_back_whole(three):
    said = [{"text": 'é"\\' * 20_000, "rank": rank} for rank in range(3)]
    found = at_once(*(lambda n=n, s=s: gather_long(n, s) for n, s in zip(three, said, strict=True)))
    assert found == [said] * 3


ATTEMPT = Attempt(source=0, target=1, address="10.0.0.2")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "refused"),
        (TimeoutError("timed out"), "silent"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "no route"),
        (PermissionError(errno.EPERM, "Operation not permitted"), "forbidden"),
        (HandshakeRefused("it could not prove that it knows the secret"), "stranger"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "other"),
    ],
)
def test_pair_when_it_does_not_come_through_then_its_cause_is_told_apart(error, cause, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pairs, "connect", refuse)
    found = pairs._attempted(ATTEMPT, 1, SECRET, time.monotonic() + 1, time.time)
    assert found.cause == cause
    (told,) = pair_checks([found], MEMBERS)
    assert told.pair == NAMES
    assert told.text.startswith(f"{NAMES[0]} does not reach {NAMES[1]} at 10.0.0.2 (")


def test_pair_when_nobody_listens_then_it_was_refused():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    attempt = Attempt(source=0, target=1, address="127.0.0.1")
    found = pairs._attempted(attempt, port, SECRET, time.monotonic() + 5, time.time)
    assert (found.cause, found.said) == ("refused", "Connection refused")


def test_pair_when_long_messages_are_lost_on_the_way_then_it_stalls(monkeypatch):
    real = Channel.send

    def lossy(channel: Channel, message: dict[str, Any]) -> None:
        if len(message.get("text", "")) < 1000:
            real(channel, message)

    monkeypatch.setattr(Channel, "send", lossy)
    is_done, listener = threading.Event(), pairs.ChannelListener(socket.AF_INET, ("127.0.0.1", 0), SECRET)
    answerer = threading.Thread(target=pairs._answer, args=(listener, is_done, time.time))
    with closing(listener):
        answerer.start()
        attempt = Attempt(source=0, target=1, address="127.0.0.1")
        found = pairs._attempted(attempt, listener.address[1], SECRET, time.monotonic() + 1.0, time.time)
        is_done.set()
        answerer.join()
    assert (found.cause, found.said) == ("stalled", "timed out")
    assert (
        "short messages come through and long ones do not: give all interfaces" in pair_checks([found], MEMBERS)[0].text
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"time": "soon"}, "its answer holds other fields than it should (time: Input should be a valid number)"),
        ({"text": "x"}, "its answer holds other fields than it should (time: Field required)"),
    ],
)
def test_pair_when_the_answer_is_none_then_that_is_said(answer, said, monkeypatch):
    real = Channel.send
    monkeypatch.setattr(Channel, "send", lambda channel, words: real(channel, answer if "time" in words else words))
    assert answered() == ("stalled", said)


def test_guest_when_it_sends_no_ping_then_it_is_sent_away(monkeypatch):
    real = Channel.send
    monkeypatch.setattr(
        Channel, "send", lambda channel, words: real(channel, words if "time" in words else {"text": 1})
    )
    assert answered() == ("stalled", "it closed the connection")


def answered() -> tuple[str | None, str]:
    """Try one way; return what was found."""
    is_done, listener = threading.Event(), pairs.ChannelListener(socket.AF_INET, ("127.0.0.1", 0), SECRET)
    answerer = threading.Thread(target=pairs._answer, args=(listener, is_done, time.time))
    with closing(listener):
        answerer.start()
        attempt = Attempt(source=0, target=1, address="127.0.0.1")
        found = pairs._attempted(attempt, listener.address[1], SECRET, time.monotonic() + 5.0, time.time)
        is_done.set()
        answerer.join()
    return found.cause, found.said


def test_node_when_what_it_tells_is_no_record_then_that_is_said():
    with pytest.raises(Misuse, match=r"node 2 speaks another protocol \(its Attempt holds other fields than it should"):
        record_of_node(Attempt, {"source": -1}, 2)


def test_versions_when_one_differs_then_both_values_and_both_nodes_are_named():
    (found,) = version_checks([GOOD.versions, {**GOOD.versions, "torch": "2.12.0"}], NAMES)
    assert (found.status, found.pair) == ("failure", NAMES)
    assert found.seen == f"torch is 2.13.0 on {NAMES[0]} and 2.12.0 on {NAMES[1]}"


def test_versions_when_only_the_driver_differs_then_it_is_a_warning():
    both = [{**GOOD.versions, "NVIDIA driver": version} for version in ("570.1", "560.2")]
    (found,) = version_checks(both, NAMES)
    assert (found.status, "NVIDIA driver is 570.1 on node 0" in found.seen) == ("warning", True)


def test_versions_when_all_are_the_same_then_they_are_told():
    (found,) = version_checks([GOOD.versions] * 2, NAMES)
    assert found.seen == "Python 3.11, torch 2.13.0, dure 0.1.0, CUDA 12.8, NCCL 2.27.3 on all nodes"


def test_devices_when_one_node_has_no_gpu_then_it_is_named():
    (found,) = device_check([host(device="cuda"), GOOD], NAMES)
    assert found.text == (
        f"the device is cuda on {NAMES[0]} and cpu on {NAMES[1]}, but all ranks must use the same kind: look why "
        f"{NAMES[1]} shows no GPU, or use --device cpu"
    )


def test_packets_when_nodes_send_other_sizes_then_both_are_named():
    (found,) = mtu_check([GOOD, host(interface=Interface(name="eth0", is_up=True, mtu=9000))], NAMES)
    assert found.seen == f"the MTU is 1500 on {NAMES[0]} and 9000 on {NAMES[1]}"


@pytest.mark.parametrize(("is_needed", "status"), [(True, "failure"), (False, "warning")])
def test_folder_when_a_node_does_not_see_it_then_it_is_named(is_needed, status):
    (found,) = folder_check([True, False], NAMES, "/data/runs", is_needed=is_needed)
    assert found.status == status
    assert found.seen == f"{NAMES[1]} does not see /data/runs of node 0"
