"""End of a run whose records cannot be written."""

import shutil

import pytest

from dure.api.local import finish
from dure.api.ranks import Notes
from dure.errors import WorkerFailed
from dure.failures.verdict import WorkerEnd
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.outcome import Outcome
from dure.records.run_dir import RunDir
from tests.specs import spec_of


def test_failure_when_the_run_folder_is_removed_then_it_is_raised_all_the_same(tmp_path, capsys):
    run = RunDir.create(tmp_path, "one")
    shutil.rmtree(tmp_path / "one")
    end = WorkerEnd(rank=0, exit_code=-9, time=0.0, was_stopped=False)
    notes = Notes(run=run, nodes=Nodes.alone(1), max_restarts=0)
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        finish(notes, spec_of(), Outcome(ends=[end]))
    assert "events.jsonl cannot be written: No such file or directory" in capsys.readouterr().err
