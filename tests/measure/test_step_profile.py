"""Tests of the profile of a rank's steps."""

import gzip
import json

import pytest
import torch

from dure.measure.step_profile import StepProfile
from dure.records.rank_profiles import facts_path, operators_path


@pytest.fixture
def construct(monkeypatch):
    """Constructor of torch's profiler, which is restored afterwards."""
    own = torch.autograd.profiler.profile.__init__
    monkeypatch.setattr(torch.autograd.profiler.profile, "__init__", own)


def _profiled(folder, number, num_steps=2, between=lambda step: None):
    said = []
    profile = StepProfile(folder, 0, num_steps, said.append)
    for step in range(1, number + 1):
        profile.begin_step(step)
        torch.ones(2, 2) @ torch.ones(2, 2)
        between(step)
    profile.close()
    return json.loads(facts_path(folder, 0).read_text()), said


def test_profile_when_steps_follow_the_first_ones_then_it_has_their_operators(tmp_path, construct):
    facts, said = _profiled(tmp_path, 8)
    trace = json.loads(gzip.decompress(operators_path(tmp_path, 0).read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert (facts["steps"], facts["fault"], said) == ([4, 5], None, [])
    assert [name for name in names if name.startswith("step ")] == ["step 4", "step 5"]
    assert names.count("aten::matmul") == 2
    assert [path.name for path in operators_path(tmp_path, 0).parent.glob("writing*")] == []


def test_profile_when_training_ends_early_then_the_steps_so_far_are_written(tmp_path, construct):
    facts, _ = _profiled(tmp_path, 5, num_steps=100)
    assert facts["steps"] == [4, 5]
    assert operators_path(tmp_path, 0).is_file()


@pytest.mark.parametrize("step", [1, 5])
def test_profile_when_the_program_profiles_itself_then_its_own_works_and_a_sentence_says_so(tmp_path, construct, step):
    found = []

    def profile_itself(number):
        if number == step:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
                torch.ones(3).add(1)
            found.extend(event.name for event in own.events())

    facts, said = _profiled(tmp_path, 8, num_steps=3, between=profile_itself)
    assert "aten::add" in found
    assert said == ["torch.profiler was used by the program itself, so the trace has steps and no operators"]
    assert facts["fault"] == said[0]
    assert not operators_path(tmp_path, 0).exists()


def test_profile_when_operators_are_too_large_then_they_are_left_out(tmp_path, construct, monkeypatch):
    monkeypatch.setattr("dure.measure.step_profile._MOST_BYTES", 10)
    facts, (said,) = _profiled(tmp_path, 8)
    assert "ask for fewer steps" in facts["fault"]
    assert said == facts["fault"]
    assert not operators_path(tmp_path, 0).exists()
