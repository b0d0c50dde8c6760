"""Messages between launchers: each comes back as it was, and what a peer may not say is refused with the reason."""

import json
from dataclasses import replace

import pytest

from dure.documents import DocumentInvalid
from dure.launch.hangs.rank_state import Call, RankState
from dure.launch.nodes import messages
from dure.launch.nodes.member import Member
from dure.launch.nodes.messages import decode, encode
from dure.process.round_orders import Restart, RoundOrders, RoundPlan

NODE = Member(node_rank=1, host="host1", address="10.0.0.2", num_ranks=2, clock_behind_seconds=-0.5)
RESTART = Restart(number=2, rank=3, step=7, cause="rank 3 was killed", microbatch_sizes=(8, 4))
PLAN = RoundPlan(orders=RoundOrders(microbatch_size=4, trusted_samples=96), restart=RESTART)
STATE = RankState(
    rank=3,
    pid=17,
    step=7,
    phase="training",
    silent_seconds=2.5,
    call=Call(op="send", group="0", role="dst", peer=None, tag=0, sizes=[[3]], is_main=True),
    groups={"0": [0, 3]},
)
MESSAGES = [
    messages.Join(num_nodes="1:2", node_rank=1, host="host1", num_ranks=2, facts={"seed": 0, "name": None}, time=5.0),
    messages.Welcome(leader=0, members=(NODE,), folder="/runs/run", term=3, keeps_memory=True),
    messages.Later(),
    messages.Refused(message="no", code=2),
    messages.Beat(),
    messages.Gather(value=[1, None]),
    messages.Gathered(values=({"a": 1}, "b")),
    messages.Ready(),
    messages.Round(number=4, port=29400, members=(NODE, replace(NODE, node_rank=0)), plan=PLAN),
    messages.Signal(number=15, ordinal=1),
    messages.Ending(why="failed"),
    messages.End(end={"rank": 1}, node_rank=0),
    messages.Done(steps={2: 7, 3: -1}, has_snapshots=True),
    messages.Over(refusal="used up"),
    messages.Lost(text="node 1 is gone", is_fatal=False),
    messages.Survey(number=12),
    messages.SurveyRequest(seconds=2.5, only_if_waited=True, is_confirmed=False),
    messages.State(number=12, state=STATE),
    messages.Surveyed(number=12),
    messages.Hang(text="no step", culprits=(3,), is_certain=True, acts=False),
    messages.NoHang(seconds=2.5),
]


def test_message_of_each_kind_when_it_was_sent_then_it_is_the_same():
    assert {type(message) for message in MESSAGES} == set(messages._KINDS.values())
    for message in MESSAGES:
        assert decode(json.loads(json.dumps(encode(message)))) == message


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "of kind 'None' is not known"),
        ({"kind": ["Beat"]}, r"of kind \"\['Beat'\]\" is not known"),
        ({"kind": "shout"}, "of kind 'shout' is not known"),
        ({"kind": "Signal", "number": 15}, r"ordinal: Field required"),
        ({"kind": "Signal", "number": "15", "ordinal": 1}, r"number: Input should be a valid integer"),
        ({"kind": "Signal", "number": 999, "ordinal": 1}, r"number: Input should be less than"),
        ({"kind": "Done", "steps": {"x": 1}, "has_snapshots": False}, r"steps\..*: Input should be a valid integer"),
        ({**encode(MESSAGES[8]), "members": [{}]}, r"members\.0\.node_rank: Field required"),
        (
            {**encode(MESSAGES[8]), "plan": {"orders": {"stopped_by": "SIGTERM"}}},
            r"plan\.orders\.stopped_by: Input should",
        ),
    ],
)
def test_message_when_it_is_malformed_then_the_reason_is_named(data, reason):
    with pytest.raises(DocumentInvalid, match=reason):
        decode(data)
