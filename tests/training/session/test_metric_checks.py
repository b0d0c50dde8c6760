"""Metrics that cannot be are refused, and those that can hardly be are said to be so."""

import math

import numpy as np
import pytest
import torch

import dure
from dure.errors import TaskInvalid, WorkerFailed
from dure.records.sums import exact_sum
from dure.training.session.metric_checks import check_count, check_sum, doubt
from tests.training.session.test_session import ROWS, Small, sums, train


@pytest.mark.parametrize(
    ("total", "count", "said"),
    [
        (True, 1, "the total of the metric acc is a truth value: give how many items it is true of"),
        (torch.tensor(True), 1, "the total of the metric acc is a truth value"),
        (np.bool_(True), 1, "the total of the metric acc is a truth value"),
        (1.0, torch.tensor(True), "the count of the metric acc is a truth value"),
        ("3", 1, "the total of the metric acc is '3': give a number or a scalar tensor"),
        (None, 1, "the total of the metric acc is None: give a number"),
        (1.0, 1j, "the count of the metric acc is 1j: give a number"),
        (torch.tensor(1j), 1, r"the total of the metric acc is tensor\(0.\+1.j\): give a number"),
    ],
)
def test_sum_when_it_holds_no_numbers_then_is_refused(total, count, said):
    with pytest.raises(TaskInvalid, match=said):
        check_sum("acc", dure.Sum(total, count))


@pytest.mark.parametrize("value", [1, 1.5, np.float32(1), np.int64(2), torch.tensor(3), torch.tensor(0.5)], ids=str)
def test_sum_when_it_holds_numbers_of_any_kind_then_is_taken(value):
    check_sum("acc", dure.Sum(value, value))


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf])
def test_count_when_nothing_can_be_counted_so_then_is_refused(count):
    with pytest.raises(TaskInvalid, match=r"the metric acc has a count of .* in a batch: give the number of items"):
        check_count("acc", count)


BATCHES = {
    "count of batches": (
        [(4.0, 1.0), (5.0, 1.0)],
        12,
        "accuracy is 4.5, which is no fraction: its count counts batches",
    ),
    "too small a count": (
        [(48.0, 16.0)] * 2,
        96,
        "accuracy is 3, which is no fraction: its count is not what the total",
    ),
    "percentage": ([(4800.0, 64.0)], 64, "accuracy is 75, .* or it is a percentage: then name it accuracy_percent"),
    "negative": ([(-1.0, 64.0)], 64, "accuracy is -0.015625, which is no fraction"),
    "mean and samples": (
        [(0.84375, 64.0), (0.9, 64.0)],
        128,
        r"a total below 1 in every batch of 64 and so is 0\.0136",
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_fraction_when_it_can_hardly_be_then_a_sentence_says_why(case):
    batches, num_samples, said = BATCHES[case]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(doubt("accuracy", batches, num_samples))


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("accuracy", [(48.0, 64.0), (1.0, 16.0)]),
        ("accuracy", [(0.0, 64.0), (1.0, 64.0)]),
        ("accuracy", [(1.0, 1.0), (0.0, 1.0)]),
        ("accuracy", [(0.67, 2.0)]),
        ("accuracy", [(math.nan, 64.0)]),
        ("val_accuracy_percent", [(4800.0, 64.0)]),
        ("perplexity", [(4800.0, 64.0)]),
        ("f1_loss", [(-3.0, 1.0)]),
        ("num_correct", [(48.0, 1.0)]),
    ],
)
def test_metric_when_it_can_be_then_nothing_is_said(name, batches):
    assert doubt(name, batches, int(sum(count for _, count in batches))) is None


def test_run_when_a_metric_is_doubtful_then_it_is_said_once_and_the_run_goes_on(tmp_path, capfd):
    methods = {
        "eval_data": lambda self: ROWS,
        "metrics": lambda self, model, batch: {"acc": dure.Sum(len(batch[0]) * 300, len(batch[0]))},
    }
    train(type("T", (Small,), methods), tmp_path, epochs=2)
    assert capfd.readouterr().err.count("dure: the metric acc is 300, which is no fraction") == 1


def test_run_when_a_count_cannot_be_then_it_is_refused_before_the_first_step(tmp_path):
    methods = {"eval_data": lambda self: ROWS, "metrics": sums(acc=dure.Sum(1.0, -2))}
    with pytest.raises(WorkerFailed, match="the metric acc has a count of -2 in a batch") as caught:
        train(type("T", (Small,), methods), tmp_path)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_run_when_totals_add_up_and_counts_do_not_then_the_metric_is_refused(tmp_path):
    methods = {
        "eval_data": lambda self: ROWS,
        "metrics": lambda self, model, batch: {"acc": dure.Sum(len(batch[0]), 1)},
    }
    with pytest.raises(WorkerFailed, match=r"metric acc counts 1 over \d samples and 2 over the same") as caught:
        train(type("T", (Small,), methods), tmp_path)
    assert caught.value.exit_code == 2


def test_run_when_a_metric_is_a_mean_over_each_batch_then_it_is_taken(tmp_path):
    methods = {
        "eval_data": lambda self: ROWS,
        "metrics": lambda self, model, batch: {"spread": dure.Sum(batch[0].float().mean(), 1)},
    }
    train(type("T", (Small,), methods), tmp_path)


@pytest.mark.parametrize("name", [0, ("a", 1), "a\ud800", "a\n\x1b[31m"])
def test_run_when_a_metric_has_a_name_that_no_record_can_have_then_it_is_refused(name, tmp_path):
    methods = {"eval_data": lambda self: ROWS, "metrics": lambda self, model, batch: {name: dure.Sum(1.0, 1)}}
    with pytest.raises(WorkerFailed, match="a name is a string of printable characters") as caught:
        train(type("T", (Small,), methods), tmp_path)
    assert caught.value.exit_code == 2


def test_run_when_a_total_is_an_integer_beyond_floats_then_it_is_refused(tmp_path):
    methods = {"eval_data": lambda self: ROWS, "metrics": sums(huge=dure.Sum(10**400, 1))}
    with pytest.raises(WorkerFailed, match="an integer that no float holds") as caught:
        train(type("T", (Small,), methods), tmp_path)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([1e308, 1e308], math.inf),
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308, -math.inf], -math.inf),
        ([math.inf, 1.0], math.inf),
        ([0.1] * 10, 1.0),
    ],
)
def test_sum_when_it_is_finite_then_is_rounded_once_and_else_is_infinite(values, total):
    assert exact_sum(values) == total
    assert math.isnan(exact_sum([math.inf, -math.inf]))
