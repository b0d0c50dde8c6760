"""Gradients that are sent smaller: what is exact stays exact, what is lost is bounded, told and carried over."""

from itertools import cycle

import pytest

import dure
from dure.errors import SpecInvalid, WorkerFailed
from dure.strategies.table import STRATEGIES
from examples.digits import Digits
from tests.conformance.cases import (
    TO_ROUNDING,
    are_same_bits,
    largest_difference,
    losses_of,
    records_of,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Regression
from tests.conformance.test_resume import back_to, resumed

STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}
COMPRESSING = [name for name, info in STRATEGIES.items() if "compression" in info.option_class().model_fields]
ALL = [
    (strategy, name)
    for strategy in COMPRESSING
    for name in ("fp16", "bf16", "powersgd", "topk", "int8")
    if name != "powersgd" or "compression_rank" in STRATEGIES[strategy].option_class().model_fields
]

TELLING = [
    pair
    for pair in ALL
    if pair[1] in {"ddp": ("powersgd", "topk", "int8"), "ring_ddp": ("topk",)}.get(pair[0], ("powersgd",))
]
"""Every way that carries something over, under `ddp`, and one each under the others."""

NEAR = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2}
"""Twenty steps of gradients that are each off by 2**-11, 2**-8 and 1/254 of their largest."""


MOST = {"fp16": 0.52, "bf16": 0.52, "powersgd": 0.5, "topk": 0.3, "int8": 0.3}
"""Most of the uncompressed bytes that a float32 model of digits may send."""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), list(zip(COMPRESSING, cycle(["mean", "tokens"]))))
def test_sending_every_element_as_the_largest_few_equals_one_process(strategy, kind, trained, tmp_path):
    task = Regression(kind=kind)
    one = weights_of(trained(task, **STEPS))
    run = train_case(
        tmp_path, task, strategy, 3, compression="topk", compression_fraction=1.0, microbatch_size=2, **STEPS
    )
    assert largest_difference(weights_of(run), one) < TO_ROUNDING
    assert {record["measured"]["compression_error"] for record in records_of(run)} == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("strategy", COMPRESSING)
def test_few_bits_stay_near_one_process_and_all_ranks_agree(strategy, name, trained, tmp_path):
    one = trained(Regression(), **STEPS)
    run = train_case(tmp_path, Regression(), strategy, 3, compression=name, **STEPS)
    difference = largest_difference(weights_of(run), weights_of(one))
    assert 0 < difference < NEAR[name]
    ours, theirs = records_of(run, 0), records_of(run, 2)
    assert [r["loss_sum"] for r in ours] == pytest.approx([r["loss_sum"] for r in theirs], rel=1e-15)
    # facts are never compressed
    assert [r["loss_count"] for r in ours] == [r["loss_count"] for r in records_of(one)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "name"), [("ddp", "fp16"), ("ddp", "bf16"), *TELLING])
def test_a_compressed_run_learns_the_digits_sends_less_and_says_so(strategy, name, tmp_path):
    settings = {"compression_fraction": 0.05} if name == "topk" else {}
    summary = dure.train(
        Digits(), strategy=strategy, nproc=2, epochs=5, global_batch_size=32, runs_dir=tmp_path, quiet=True,
        start="fork", device="cpu", **{strategy: {"compression": name, **settings}},
    )  # fmt: skip
    assert summary.metrics["accuracy"].value > 0.95
    assert any(".compression: the gradient" in text for text in summary.not_preserved)
    last = records_of(tmp_path / summary.run)[-1]
    # what each of two ranks sends of gradients as they are; parameters that a strategy sends stay so
    plain = sum(tensor.numel() * 4 for tensor in weights_of(tmp_path / summary.run).values())
    assert (1 - MOST[name]) * plain < last["measured"]["saved_bytes"] < plain
    assert last["sent_bytes"] > 0
    # PowerSGD's error holds the difference between the ranks' samples too
    assert 0 < last["measured"]["compression_error"] < (2 if name == "powersgd" else 1)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "name"), TELLING)
def test_a_compressed_run_resumed_in_the_same_place_is_bit_equal(strategy, name, tmp_path):
    settings = {**STEPS, "checkpoint": {"every_samples": 14, "keep": 99}, "compression_fraction": 0.2}
    if name != "topk":
        del settings["compression_fraction"]
    task = Regression(dtype="float32", layered=True)
    whole = train_case(tmp_path, task, strategy, 2, compression=name, **settings)
    run = resumed(back_to(whole, 72, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))
    assert losses_of(run) == losses_of(whole)


def test_what_cannot_be_compressed_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(WorkerFailed, match=r"compression is topk and precision fp16: .* use precision=.bf16"):
        train_case(tmp_path, Regression(dtype="float32"), "ddp", 2, compression="topk", precision="fp16", **STEPS)
    with pytest.raises(WorkerFailed, match="compression is powersgd but scale is a parameter of one number"):
        train_case(tmp_path, Regression(), "ddp", 2, compression="powersgd", **STEPS)
    with pytest.raises(SpecInvalid, match=r"compression powersgd is a hook of torch's DDP: use strategy=.ddp"):
        train_case(tmp_path, Regression(), "ring_ddp", 2, compression="powersgd", **STEPS)
    with pytest.raises(
        SpecInvalid, match=r"naive_ddp has no option compression: choose strategy=.ddp. \(or ring_ddp, zero1"
    ):
        train_case(tmp_path, Regression(), "naive_ddp", 2, ddp={"compression": "int8"}, **STEPS)
