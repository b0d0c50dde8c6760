"""Summaries from events: what was lost with a rank, and what a resumed run made good."""

import pytest

from dure.records.events import RankLost, Training, UnusedShare
from dure.records.run_dir import RunDir
from dure.report.summary import summarise
from dure.spec import RunSpec


def training(samples_seen):
    return Training(
        world_size=3, num_devices=3, device="cpu", epoch_samples=100, total_samples=100, samples_seen=samples_seen,
        step=0, not_preserved=("dropout",),
    )  # fmt: skip


def lost(rank, *ends):
    shares = [UnusedShare(rank=rank, step=1, epoch=0, samples_seen=end, samples=(end - 2, end - 1)) for end in ends]
    return RankLost(rank=rank, samples_seen=max(ends), shares=tuple(shares))


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([training(0)], []),
        (
            [training(0), lost(2, 10, 20), lost(1, 20)],
            [
                "rank 2 was lost: 4 samples of its shares were not used",
                "rank 1 was lost: 2 samples of its shares were not used",
            ],
        ),
        # taken up at 10 samples, the run used those of 20 after all
        ([training(0), lost(2, 10, 20), training(10)], ["rank 2 was lost: 2 samples of its shares were not used"]),
        ([training(0), lost(2, 10, 20), training(0)], []),
    ],
)
def test_summary_when_ranks_were_lost_then_counts_the_samples_that_nobody_used(events, said, tmp_path):
    run = RunDir.create(tmp_path, "run")
    for event in events:
        run.append_event(event)
    summary = summarise(run, RunSpec(task="task.py:Task"), "completed")
    assert summary.not_preserved == ["dropout", *said]
