"""Launchers that meet: they agree, or all are told why not."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from dure.errors import DureError, EnvironmentLacks, Misuse, SpecInvalid, WorkerFailed
from dure.failures.verdict import WorkerEnd
from dure.launch.nodes import peers as nodes_module
from dure.launch.nodes import rendezvous
from dure.launch.nodes.addresses import split_address
from dure.launch.nodes.channel import ChannelListener, connect
from dure.launch.nodes.member import Member, StoppedByPeer
from dure.launch.nodes.messages import Refused, Welcome, encode
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.rendezvous import NodeSettings, join, node_settings
from dure.launch.nodes.secret import read_secret
from tests.launch.nodes.one_read import answer_together
from tests.record_cases import failure_of

FACTS = {"script": "train.py", "seed": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(rendezvous, "LAST_CALL_SECONDS", 0.1)


@pytest.fixture
def settings(tmp_path: Path) -> NodeSettings:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return NodeSettings(
        num_nodes=2,
        node_rank=0,
        rendezvous=f"127.0.0.1:{port}",
        secret_file=tmp_path / "secret",
        timeout_seconds=10,
    )


def met(*joining: Callable[[], Nodes]) -> list["Nodes | DureError"]:
    """Let all join at once; what each got."""

    def got(future: "Future[Nodes]") -> "Nodes | DureError":
        error = future.exception(20)
        if error is not None and not isinstance(error, DureError):
            raise error
        return error or future.result()

    with ThreadPoolExecutor(len(joining)) as pool:
        return [got(future) for future in [pool.submit(one) for one in joining]]


def both(
    settings: NodeSettings, theirs: NodeSettings | None = None, facts: dict | None = None
) -> list["Nodes | DureError"]:
    theirs = theirs or replace(settings, node_rank=1)
    return met(lambda: join(settings, FACTS, 2), lambda: join(theirs, FACTS if facts is None else facts, 1))


@pytest.fixture
def two(settings: NodeSettings):
    with ExitStack() as stack:
        yield [stack.enter_context(node) for node in both(settings)]


def test_nodes_when_they_agree_then_ranks_follow_each_other(two):
    assert [(node.first_rank, node.world_size, node.own_address) for node in two] == [
        (0, 3, "127.0.0.1"),
        (2, 3, "127.0.0.1"),
    ]
    assert two[1].interface == "lo"
    assert [(member.node_rank, member.num_ranks) for member in two[0].members] == [(0, 2), (1, 1)]


def test_rendezvous_when_all_are_there_then_nobody_can_knock_any_more(two, settings):
    with pytest.raises(ConnectionRefusedError, match="refused"):
        socket.create_connection(("127.0.0.1", split_address(settings.rendezvous)[1]))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({**FACTS, "seed": 1}, r"nodes do not run the same: seed is 0 on node 0 and 1 on node 1 \("),
        ({"script": "x.py", "seed": 0}, "script is train.py on node 0 and x.py on node 1"),
        ({"script": "train.py"}, r"seed is 0 on node 0 and not given on node 1"),
        ({**FACTS, "torch version": "1.0"}, "torch version is .* on node 0 and 1.0 on node 1"),
    ],
)
def test_nodes_when_they_disagree_then_both_are_told_the_field_and_both_values(facts, sentence, settings):
    for error in both(settings, facts=facts):
        assert isinstance(error, Misuse)
        with pytest.raises(Misuse, match=sentence):
            raise error


def test_nodes_when_their_numbers_differ_then_both_are_told(settings):
    for error in both(settings, replace(settings, node_rank=1, num_nodes=3)):
        with pytest.raises(Misuse, match="nnodes is 2 on node 0 and 3 on node 1"):
            raise error


def test_nodes_when_two_have_one_rank_then_all_are_told(settings):
    three = [replace(settings, num_nodes=3, node_rank=rank) for rank in (0, 1, 1)]
    for error in met(*(lambda one=one: join(one, FACTS, 1) for one in three)):
        with pytest.raises(Misuse, match=r"two nodes have node_rank 1 .* give each node another --node-rank, 0 to 2"):
            raise error


@pytest.mark.alone
def test_node_when_it_does_not_come_then_it_is_named_to_those_who_came(settings):
    three = replace(settings, num_nodes=3, timeout_seconds=1.0)
    began = time.monotonic()
    for error in met(*(lambda rank=rank: join(replace(three, node_rank=rank), FACTS, 1) for rank in (0, 1))):
        with pytest.raises(EnvironmentLacks, match=r"node 2 of 3 did not come to 127.0.0.1:.* within 1 s: start it"):
            raise error
    assert time.monotonic() - began < 3


def test_node_when_its_secret_is_another_then_it_says_so_and_node_zero_goes_on_waiting(settings, tmp_path):
    other = tmp_path / "other"
    other.write_text("another secret of that length")
    other.chmod(0o600)
    waiting = replace(settings, timeout_seconds=2.0)
    zero, one = both(waiting, replace(waiting, node_rank=1, secret_file=other))
    with pytest.raises(Misuse, match=r"has another secret than this node .*: copy node 0's secret file here"):
        raise one
    with pytest.raises(EnvironmentLacks, match=r"node 1 of 2 did not come .*; 3 that came did not know the secret"):
        raise zero


def test_node_when_nobody_answers_then_the_address_is_named(settings):
    read_secret(settings.secret_file, host="x", may_make=True)
    with pytest.raises(
        EnvironmentLacks, match=r"nothing answered at 127.0.0.1:\d+ within 0.5 s .*: start node 0 there"
    ):
        join(replace(settings, node_rank=1, timeout_seconds=0.5), FACTS, 1)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("0.0.0.0:29400", "names all interfaces: give the one address of node 0"),
        ("[::]:29400", "names all interfaces"),
        ("8.8.8.8:29400", "is a public address, and gradients would travel unencrypted: .*--allow-public-address"),
        ("192.0.2.1:29400", r"the rendezvous host 192.0.2.1 is not this host, which is node 0 \(its addresses:"),
        ("no-such-host.invalid:1", "the rendezvous host no-such-host.invalid is not known here"),
    ],
)
def test_rendezvous_when_its_address_cannot_be_then_one_sentence_says_so(address, sentence, settings):
    with pytest.raises(Misuse, match=sentence):
        join(replace(settings, rendezvous=address), FACTS, 1)


def test_rendezvous_when_its_port_is_taken_then_another_is_asked_for(settings):
    with (
        socket.create_server(("127.0.0.1", split_address(settings.rendezvous)[1])),
        pytest.raises(Misuse, match="is taken by another process: give another one in --rendezvous"),
    ):
        join(settings, FACTS, 1)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.1:7", ("10.0.0.1", 7)),
        ("host", ("host", 29400)),
        ("[fe80::1]:7", ("fe80::1", 7)),
        ("fe80::1", ("fe80::1", 29400)),
    ],
)
def test_address_when_read_then_host_and_port_come_apart(text, parts):
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["", ":7", "a b:7", "host:0", "host:70000", "host:x", "[::1", "tcp://host:7"])
def test_address_when_it_is_none_then_it_is_refused(text):
    with pytest.raises(ValueError, match=r"that is no address|is no port"):
        split_address(text)


def test_settings_when_they_cannot_be_then_all_faults_come_at_once():
    with pytest.raises(SpecInvalid, match=r"(?s)rendezvous_timeout is 0.*node_rank is 2 but must be 0 to 1.*not given"):
        node_settings(
            nnodes=2,
            node_rank=2,
            rendezvous=None,
            secret_file=None,
            timeout_seconds=0,
            allow_public_address=False,
        )


# --- the secret


def test_secret_when_node_zero_makes_it_then_only_its_owner_can_read_it(tmp_path):
    file = tmp_path / "a" / "secret"
    made = read_secret(file, host="x", may_make=True)
    assert len(made) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_secret(file, host="x", may_make=True) == made
    assert os.listdir(file.parent) == ["secret"]


def test_secret_when_others_can_read_it_then_the_cure_is_said(tmp_path):
    file = tmp_path / "secret"
    file.write_text("x" * 32)
    file.chmod(0o640)
    with pytest.raises(Misuse, match=r"can be read by others \(mode 0640\): `chmod 600 .*secret`"):
        read_secret(file, host="x", may_make=False)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda file: None, "there is no secret at .*: node 0 makes it, copy it from there .`scp head:"),
        (lambda file: file.touch(0o600), "has 0 bytes but must have at least 16"),
        (lambda file: file.mkdir(0o700), "is no file"),
    ],
)
def test_secret_when_it_cannot_be_used_then_one_sentence_says_so(make, sentence, tmp_path):
    make(tmp_path / "secret")
    with pytest.raises(Misuse, match=sentence):
        read_secret(tmp_path / "secret", host="head", may_make=False, patience_seconds=0)


# --- while the run goes on


def until(node: Nodes, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        node.pump()
        time.sleep(0.005)
    assert condition()


def test_nodes_when_they_gather_then_each_has_what_all_said(two):
    with ThreadPoolExecutor(2) as pool:
        for word in ("a", "b"):
            said = list(pool.map(lambda node, word=word: node.gather(f"{word}{node.me.node_rank}"), two))
            assert said == [[f"{word}0", f"{word}1"]] * 2


def test_node_when_it_refuses_then_the_other_raises_the_same(two):
    with pytest.raises(SpecInvalid, match="no such folder"), two[1]:
        raise SpecInvalid(["no such folder"])
    with pytest.raises(Misuse, match="no such folder"):
        two[0].gather(None)


def test_node_when_it_is_refused_in_the_same_read_as_its_welcome_then_it_says_why(settings):
    secret = read_secret(settings.secret_file, host="127.0.0.1", may_make=True)
    listener = ChannelListener(socket.AF_INET, split_address(settings.rendezvous), secret)
    members = tuple(Member(node_rank=rank, host="h", address="127.0.0.1", num_ranks=1) for rank in range(2))
    with closing(listener), ThreadPoolExecutor(1) as pool:
        refusal = Refused(message="no such folder", code=Misuse.exit_code)
        answering = pool.submit(answer_together, listener, Welcome(leader=0, members=members), refusal)
        with join(replace(settings, node_rank=1), FACTS, 1) as node, pytest.raises(Misuse, match="no such folder"):
            node.gather(None)
        answering.result()


def test_node_when_it_vanishes_then_it_is_named(two):
    two[1]._channels[0].close()
    until(two[0], lambda: two[0].lost)
    with pytest.raises(WorkerFailed, match=r"node 1 \(.*, 127.0.0.1\) is gone \(it closed the connection\)"):
        two[0].gather(None)


def test_node_when_it_falls_silent_then_it_is_lost(two, monkeypatch):
    monkeypatch.setattr(nodes_module, "SILENCE_SECONDS", 0.2)
    two[0].watch()
    until(two[0], lambda: two[0].lost)
    assert "nothing was heard of it for" in two[0].lost


def test_node_when_it_has_looked_for_the_leader_for_long_then_it_did_not_stand_still(two, monkeypatch):
    monkeypatch.setattr(nodes_module, "SILENCE_SECONDS", 0.1)
    two[1].watch()
    two[1].pump()
    time.sleep(0.2)  # all the while it does not pump
    two[1].follow(two[1]._channels[0], 0)
    two[1].pump()
    assert two[1].lost is None


@pytest.mark.alone
def test_node_when_it_beats_then_it_is_not_lost(two, monkeypatch):
    monkeypatch.setattr(nodes_module, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(nodes_module, "BEAT_SECONDS", 0.1)
    for node in two:
        node.watch()
    deadline = time.monotonic() + 0.7
    while time.monotonic() < deadline:
        for node in two:
            node.pump()
        time.sleep(0.01)
    assert [node.lost for node in two] == [None, None]


def test_node_when_it_is_asked_to_stop_then_the_other_hears_it_once(two):
    theirs, mine = [int(signal.SIGTERM)], []
    two[1].exchange_signals(theirs)
    two[1].exchange_signals(theirs)
    until(two[0], lambda: two[0]._signals)
    assert two[0].exchange_signals(mine) == mine == [signal.SIGTERM]
    two[0].send_ending("stopped")
    until(two[1], lambda: two[1].news.endings)
    assert two[1].exchange_signals(theirs) == []


@pytest.mark.parametrize("is_asked", [False, True])
def test_node_when_it_comes_while_the_run_stops_then_the_ranks_may_write_their_checkpoint(is_asked, settings):
    elastic = replace(settings, num_nodes=3, fewest_nodes=2)
    zero, one = met(lambda: join(elastic, FACTS, 1), lambda: join(replace(elastic, node_rank=1), FACTS, 1))
    with zero, one:
        comes = replace(zero.me, node_rank=2)
        zero.reception.waiting[2] = comes
        zero.add(2, zero._channels[1])
        zero.ready.add(2)
        zero.exchange_signals([int(signal.SIGTERM)] if is_asked else [])
        zero.reception.let_in(zero)
        assert (zero.news.interrupted_because is None) is is_asked


def test_round_when_a_lost_node_has_joined_again_before_its_end_then_it_is_not_waited_for(settings, monkeypatch):
    monkeypatch.setattr(rendezvous, "LAST_CALL_SECONDS", 60.0)  # node 0 does not begin alone, however late node 1 comes
    elastic = replace(settings, num_nodes=2, fewest_nodes=1)
    zero, one = met(lambda: join(elastic, FACTS, 1), lambda: join(replace(elastic, node_rank=1), FACTS, 1))
    with zero, one:
        zero.is_under_way = True
        zero.reception.folder = "runs/run"
        zero._lose(1, "it closed the connection")
        assert zero.news.interrupted_because is not None
        family, address = socket.AF_INET, zero.reception.listener.address
        secret = read_secret(settings.secret_file, host="x", may_make=False)
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(connect, family, address, secret, timeout_seconds=5)
            until(zero, connecting.done)
        with closing(connecting.result()) as again:
            again.send(encode(replace(zero.reception.mine, node_rank=1)))
            until(zero, lambda: zero.is_known(1))
            deadline = time.monotonic() + 1.0
            zero.finish_round([], {}, lambda: time.monotonic() < deadline, has_snapshots=False)
            assert time.monotonic() < deadline


def test_node_when_it_says_what_makes_no_sense_then_it_is_left_out_and_the_reason_is_named(two):
    two[1]._channels[0].send({"kind": "Signal", "number": "x", "ordinal": 1})
    until(two[0], lambda: two[0].lost)
    assert (
        "its message of kind Signal holds other fields than it should (number: Input should be a valid" in two[0].lost
    )


def test_nodes_when_all_are_asked_to_stop_at_once_then_it_is_one_wish_and_a_second_is_another(two):
    received = [[int(signal.SIGTERM)], [int(signal.SIGTERM)]]
    for node, mine in zip(two, received, strict=True):
        node.exchange_signals(mine)
    for node, mine in zip(two, received, strict=True):
        until(node, lambda node=node: node._signals)
        assert node.exchange_signals(mine) == []
    received[0].append(int(signal.SIGINT))
    two[0].exchange_signals(received[0])
    until(two[1], lambda: two[1]._signals)
    assert two[1].exchange_signals(received[1]) == [signal.SIGINT]


def test_node_when_the_other_is_asked_to_stop_before_the_ranks_then_it_does_not_start_them(two):
    two[1].exchange_signals([int(signal.SIGUSR1)])
    with pytest.raises(StoppedByPeer, match="another node was asked to stop"):
        two[0].gather(None)


def test_ends_when_all_nodes_have_finished_then_each_has_all_in_node_zeros_time(settings, monkeypatch):
    real = rendezvous.time.time
    behind = threading.local()

    class Clock:
        monotonic, sleep = time.monotonic, time.sleep

        @staticmethod
        def time() -> float:
            return real() - getattr(behind, "seconds", 0.0)

    def join_late() -> Nodes:
        behind.seconds = 1000.0
        return join(replace(settings, node_rank=1), FACTS, 1)

    monkeypatch.setattr(rendezvous, "time", Clock)
    zero, one = met(lambda: join(settings, FACTS, 1), join_late)
    now = real()
    failure = failure_of(1, time=now - 1000.0, message="🏖" * 10_000)
    ends = [
        [WorkerEnd(rank=0, exit_code=1, time=now + 1, was_stopped=False, node="node 0")],
        [WorkerEnd(rank=1, exit_code=1, time=now - 1000.0, was_stopped=False, failure=failure)],
    ]
    with zero, one, ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda node, mine: node.finish_round(mine, {}, lambda: True, has_snapshots=False), (zero, one), ends
            )
        )
        zero.send_outcome(refusal="no more")
        until(one, lambda: one.is_over)
        told = zero.news.ends, one.news.ends
    assert one.over.refusal == "no more"
    assert [end.rank for end in told[0]] == [end.rank for end in told[1]] == [0, 1]
    assert abs(told[0][1].time - now) < 1.0
    assert abs(told[0][1].failure.time - now) < 1.0
    assert told[0][1].failure.message == "🏖" * 300
    assert told[1][0].node == "node 0"
