"""A bit of a weight flips on one rank: it is named, nothing of it is saved, and a healed run is the undisturbed one."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import dure
from dure.errors import SpecInvalid, WorkerFailed
from tests.commands import RunFiles
from tests.conformance.cases import are_same_bits, is_layered, samples_by_epoch, train_case, weights_of
from tests.conformance.tasks import Normalised, Regression

STEPS = {"global_batch_size": 11, "samples": 132, "seed": 5, "snapshot_every": 1, "check_replicas_every": 2}
"""Twelve steps, four in each epoch."""
HEALS = {"on_divergence": "heal", "max_restarts": 3, "record_samples": True}
# strategy, ranks, layout, the rank whose bit flips and who holds the same, and in which tensor
LAYOUTS = [
    ("ddp", 3, None, 0, [0, 1, 2], {}),
    # what is trained is sent anew in every step by the rank that keeps its state
    ("zero1", 3, None, 2, [0, 1, 2], {"tensor": "frozen.weight"}),
    ("parameter_server", 3, None, 1, [0, 1, 2], {"tensor": "frozen.weight"}),
    ("fsdp", 4, "replica=2,shard=2", 3, [1, 3], {}),
    ("pipeline", 4, "data=2,pipeline=2", 2, [0, 2], {}),
    ("tensor_parallel", 4, "data=2,tensor=2", 0, [0, 2], {}),
]
PLACES = [pytest.param(*one, id=one[0], marks=[] if one[0] == "ddp" else pytest.mark.slow) for one in LAYOUTS]


def planned(folder: Path, rank: int, step: int, **more: object) -> Path:
    file = folder / "faults.toml"
    lines = [f"{key} = {value!r}" for key, value in {"rank": rank, "step": step, "kind": "flip", **more}.items()]
    file.write_text("\n".join(["[[fault]]", *lines]))
    return file


def diverged(run: Path) -> dict:
    (event,) = RunFiles(run).events("replicas_diverged")
    return event


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "nproc", "mesh", "rank", "holders", "where"), PLACES)
def test_rank_when_a_bit_of_it_flips_then_it_is_named_and_a_healed_run_is_the_undisturbed(
    strategy, nproc, mesh, rank, holders, where, tmp_path
):
    task = Regression(kind="tokens", optimizer="adamw", layered=is_layered(strategy))
    settings = {**STEPS, **HEALS, "mesh": mesh}
    undisturbed = train_case(tmp_path, task, strategy, nproc, **settings)
    run = train_case(tmp_path, task, strategy, nproc, faults=planned(tmp_path, rank, 6, **where), **settings)
    event = diverged(run)
    assert (event["holders"], event["step"], event["agreed_step"]) == (holders, 6, 4)
    assert event["ranks"] == ([rank] if len(holders) > 2 else [])
    (healed,) = RunFiles(run).events("replica_healed")
    assert healed["step"] == 4
    assert are_same_bits(weights_of(undisturbed), weights_of(run))
    assert list(samples_by_epoch(run)) == [list(range(44))] * 3
    assert not RunFiles(undisturbed).events("replicas_diverged")


@pytest.mark.slow
def test_run_when_it_is_to_stop_then_it_names_rank_tensor_value_and_checkpoint(tmp_path):
    faults = planned(tmp_path, 2, 7, tensor="outer.bias", element=3, bit=63)
    said = (
        r"^rank 2 holds other values than ranks 0, 1 after step 8: .* on ranks 0, 1, .* on rank 2.*; all agreed after "
        r"step 6; likelier than broken hardware is code that does something on some ranks only .*: run again, and if "
        r"the same tensor differs at the same step it is the code, .* continue from the earlier checkpoint "
        r"samples-000000000044 with resume="
    )
    with pytest.raises(WorkerFailed, match=said) as info:
        # a checkpoint that is still being written is none to go on from
        train_case(tmp_path, Regression(), "ddp", 3, faults=faults, checkpoint={"background": False}, **STEPS)
    assert info.value.exit_code == 1
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert "outer.bias" in diverged(run)["tensors"]
    assert RunFiles(run).checkpoints() == ["samples-000000000044"]
    undisturbed = train_case(tmp_path, Regression(), "ddp", 3, **STEPS)
    dure.train(resume=run, quiet=True)
    assert are_same_bits(weights_of(undisturbed), weights_of(run))


def test_checkpoint_when_it_is_due_then_replicas_are_compared_before_it(tmp_path):
    settings = {**STEPS, "check_replicas_every": 1000}
    with pytest.raises(WorkerFailed, match="rank 1 holds other values than ranks 0, 2 after step 8"):
        train_case(tmp_path, Regression(), "ddp", 3, faults=planned(tmp_path, 1, 6), **settings)
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert RunFiles(run).checkpoints() == ["samples-000000000044"]


def test_restart_when_replicas_parted_before_it_then_it_does_not_hide_that(tmp_path):
    faults = planned(tmp_path, 1, 6)
    faults.write_text(faults.read_text() + '\n[[fault]]\nrank = 0\nstep = 7\nkind = "kill"\n')
    settings = {**STEPS, "check_replicas_every": 1000, "max_restarts": 3}
    with pytest.raises(
        WorkerFailed, match="before the restart rank 1 held other weights or optimiser state after step"
    ):
        train_case(tmp_path, Regression(), "ddp", 2, faults=faults, **settings)
    undisturbed = train_case(tmp_path, Regression(), "ddp", 2, **settings)
    healed = train_case(tmp_path, Regression(), "ddp", 2, faults=faults, on_divergence="heal", **settings)
    assert are_same_bits(weights_of(undisturbed), weights_of(healed))


@pytest.mark.slow
def test_ranks_when_there_are_two_then_none_is_named_and_both_go_back(tmp_path):
    undisturbed = train_case(tmp_path, Regression(), "ddp", 2, **STEPS)
    run = train_case(tmp_path, Regression(), "ddp", 2, faults=planned(tmp_path, 0, 6), **STEPS, **HEALS)
    assert diverged(run)["ranks"] == []
    assert (
        "ranks 0, 1 hold different values after step 6, and with two it is unknown which are wrong"
        in diverged(run)["message"]
    )
    assert are_same_bits(weights_of(undisturbed), weights_of(run))


@pytest.mark.slow
def test_run_when_nothing_is_asked_for_then_replicas_are_compared_in_little_time(tmp_path):
    settings = {key: value for key, value in STEPS.items() if key != "check_replicas_every"}
    run = train_case(tmp_path, Regression(), "ddp", 2, **{**settings, "samples": 1320})
    (told,) = RunFiles(run).events("replicas_compared")
    assert told["count"] >= 30  # before the checkpoint of each of 30 epochs
    assert told["every"] > 1


def test_comparisons_when_turned_off_then_nothing_is_noticed(tmp_path):
    settings = {**STEPS, "check_replicas_every": 0}
    run = train_case(tmp_path, Regression(), "ddp", 2, faults=planned(tmp_path, 0, 6), **settings)
    assert not RunFiles(run).events("replicas_diverged")


@pytest.mark.slow
def test_flip_when_it_makes_the_loss_infinite_then_the_bit_is_the_cause_that_is_told(tmp_path):
    # the highest bit of the exponent of a number near 1
    faults = planned(tmp_path, 1, 6, tensor="scale", bit=62)
    with pytest.raises(WorkerFailed, match=r"rank 1 holds other values than ranks 0, 2 after step 5: scale is .*e\+30"):
        train_case(tmp_path, Regression(), "ddp", 3, faults=faults, **STEPS)


@pytest.mark.slow
def test_statistics_when_synchronised_then_they_are_compared_too(tmp_path):
    settings = {**STEPS, "sync_batchnorm": True}
    run = train_case(tmp_path, Normalised(), "ddp", 3, **settings)
    assert RunFiles(run).events("replicas_compared")
    with pytest.raises(WorkerFailed, match="rank 1 holds other values"):
        train_case(tmp_path, Normalised(), "ddp", 3, faults=planned(tmp_path, 1, 6, bit=50), **settings)


@pytest.mark.slow
def test_statistics_when_not_synchronised_then_each_rank_may_have_its_own(tmp_path):
    run = train_case(tmp_path, Normalised(), "ddp", 3, **STEPS)
    assert not RunFiles(run).events("replicas_diverged")


@pytest.mark.slow
def test_rank_when_it_goes_wrong_again_then_the_run_ends(tmp_path):
    with pytest.raises(WorkerFailed, match=r"rank \d holds other values[\s\S]*the same failure came again at step"):
        train_case(tmp_path, Stubborn(), "ddp", 3, **STEPS, **HEALS)
    (run,) = tmp_path.iterdir()
    assert len(RunFiles(run).events("replica_healed")) == 1


class Stubborn(Regression):
    """Computes something else on the rank that has a certain sample, each time."""

    def loss(self, model, batch):
        mark = self.train_data().tensors[0][17, 0, 0]
        if torch.is_grad_enabled() and bool((batch[0][:, 0, 0] == mark).any()):
            with torch.no_grad():
                model.inner.bias.add_(1.0)
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "single", "on_divergence": "heal"}, "strategy single cannot honour it: choose strategy=.ddp. "),
        ({"strategy": "averaging", "nproc": 2, "check_replicas_every": 5}, "strategy averaging cannot honour it"),
        ({"nproc": 2, "on_divergence": "heal", "max_restarts": 0}, "but max_restarts is 0: raise it, or choose stop"),
        ({"nproc": 2, "on_divergence": "heal", "check_replicas_every": 0}, "so nothing would be noticed"),
    ],
)
def test_setting_when_it_cannot_be_then_it_is_refused_in_words(settings, said, tmp_path):
    with pytest.raises(SpecInvalid, match=said):
        dure.train(Regression(), runs_dir=tmp_path, **settings)


@pytest.mark.parametrize(
    ("strategy", "settings", "said"),
    [
        ("fsdp", {}, "but no two ranks hold the same in this layout: there is nothing to compare"),
        ("parameter_server", {"sync": False}, "but ranks are not in step with each other"),
    ],
)
def test_comparisons_when_asked_for_and_nothing_is_the_same_then_that_is_said(strategy, settings, said, tmp_path):
    with pytest.raises(WorkerFailed, match=said) as info:
        train_case(tmp_path, Regression(), strategy, 2, **STEPS, **settings)
    assert info.value.exit_code == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tensor": "nowhere"}, r"tensor is nowhere but the rank has no such parameter; it has scale, frozen\.weight"),
        ({"tensor": "outer.bias", "element": 6}, "element 6, bit 0 is not in its 6 elements of 64 bits"),
        ({"bit": 64}, "bit 64 is not in its"),
    ],
)
def test_flip_when_its_place_cannot_be_then_it_is_refused_before_the_first_step(more, said, tmp_path):
    with pytest.raises(WorkerFailed, match=said) as info:
        train_case(tmp_path, Regression(), "ddp", 2, faults=planned(tmp_path, 0, 6, **more), **STEPS)
    assert info.value.exit_code == 2


class SlowsDownByLosses(Regression):
    """Has a schedule by what the loss has noted, which is another thing on each rank."""

    def build_schedule(self, optimizer, total_samples):
        self.losses = []
        return lambda samples_seen: 0.5 ** sum(b > a for a, b in pairwise(self.losses))

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.losses.append(loss.item())
        return loss


def test_schedule_when_it_goes_by_what_each_rank_saw_then_that_is_the_cause_that_is_told(tmp_path):
    with pytest.raises(
        WorkerFailed, match=r"after step \d+ lr of the optimiser is .* on rank 0 and .* on rank 1"
    ) as error:
        train_case(tmp_path, SlowsDownByLosses(), "ddp", 2, **{**STEPS, "check_replicas_every": 1})
    assert error.value.exit_code == 2


class SlowsDownForOneStep(Regression):
    """Sets the learning rate of the third step in a hook, by what the loss has noted, and then sets it back."""

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        rate, self.losses = optimizer.param_groups[0]["lr"], []

        def set_rate(*_):
            is_due = len(self.losses) % 4 == 2
            optimizer.param_groups[0]["lr"] = rate / (1 + self.losses[-1]) if is_due else rate

        optimizer.register_step_post_hook(set_rate)
        return optimizer

    def build_schedule(self, optimizer, total_samples):
        return None

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.losses.append(loss.item())
        return loss


def test_hook_when_it_set_another_rate_on_each_rank_then_that_is_the_cause_that_is_told(tmp_path):
    said = r"after step 4 settings of the optimiser have been others on rank 1 than on rank 0"
    with pytest.raises(WorkerFailed, match=said) as error:
        train_case(tmp_path, SlowsDownForOneStep(), "ddp", 2, **{**STEPS, "check_replicas_every": 4})
    assert error.value.exit_code == 2
