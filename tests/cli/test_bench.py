"""`dure bench`: nccl-tests' columns, a record that planning can read, and the teaching view."""

import json
from pathlib import Path
from typing import Any

import pytest

from dure.api import bench as library
from dure.api.bench import BenchSettings, bench, explain, link_costs
from dure.cli import main
from dure.comm.timing import BUS_FACTORS, sizes_between
from dure.errors import EnvironmentLacks, Misuse, SpecInvalid
from dure.records.link_costs import default_path, fit_cost, read_costs
from dure.report.bench_plot import check_plot

SMALL = "bench --nproc 3 --collectives all --algorithms all --min-bytes 8 --max-bytes 4K --factor 8"


@pytest.mark.slow
def test_bench_when_asked_for_json_then_is_one_document_without_wrong_elements(capfd: Any, tmp_path: Path) -> None:
    record = tmp_path / "state/machine.json"
    assert main([*SMALL.split(), "--json", "--record", str(record)]) == 0
    document = json.loads(capfd.readouterr().out)
    rows = document["rows"]
    assert {row["num_wrong"] for row in rows} == {0}
    assert {row["collective"] for row in rows} == set(BUS_FACTORS)
    assert len({row["algorithm"] for row in rows}) == 8
    # of three ranks a gather's or a scatter's vector is rounded up to a multiple of three elements
    assert {row["num_bytes"] for row in rows if row["collective"] == "all_reduce"} == {8, 64, 512, 4096}
    for row in rows:
        assert row["bus_bytes_per_second"] == pytest.approx(
            row["num_bytes"] / row["seconds"] * BUS_FACTORS[row["collective"]](3)
        )
    kept = read_costs(record)
    assert len(kept) == 8 + 4
    assert {(cost.link, cost.world_size) for cost in kept} == {("loopback", 3), ("shared memory", 3)}
    assert all(cost.alpha_seconds >= 0 and cost.beta_seconds_per_byte >= 0 for cost in kept)


@pytest.mark.parametrize(
    ("dtype", "op"), [("float16", "mean"), ("bfloat16", "max"), ("int64", "mean"), ("float64", "sum")]
)
def test_bench_when_dtype_and_op_are_others_then_nothing_is_wrong(dtype: str, op: str) -> None:
    settings = BenchSettings(
        nproc=3, algorithms=("ring", "shm", "halving_doubling", "star"), min_bytes=8, max_bytes=1000, factor=125,
        dtype=dtype, op=op,
    )  # fmt: skip
    assert {row["num_wrong"] for row in bench(settings).rows} == {0}


def test_algorithms_when_the_device_is_an_accelerator_then_shared_memory_is_left_out_or_refused() -> None:
    assert library._algorithms_on("cpu", None) == ("backend", "ring", "shm")
    assert library._algorithms_on("cuda", None) == ("backend", "ring")
    assert "shm" not in library.algorithms_of("cuda")
    with pytest.raises(SpecInvalid, match="algorithm shm reduces CPU tensors only, but the device is cuda: leave it"):
        library._algorithms_on("cuda", ("ring", "shm"))


def test_bench_when_a_rank_fails_then_the_rows_before_are_shown(capfd: Any) -> None:
    line = "bench --collectives all_reduce,reduce_scatter --op max --algorithms ring --max-bytes 8 --no-record"
    assert main(line.split()) == 2
    out, err = capfd.readouterr()
    assert out.splitlines()[1].split()[:3] == ["all_reduce", "ring", "8"]
    assert "op is max but reduce_scatter is measured with sum" in err


def test_bench_when_shown_then_has_the_columns_of_nccl_tests(capfd: Any, tmp_path: Path) -> None:
    line = f"bench --algorithms ring --min-bytes 1K --max-bytes 4K --plot {tmp_path / 'p.svg'} --no-record"
    assert main(line.split()) == 0
    head, *rows = capfd.readouterr().out.splitlines()
    assert head.split()[0] == "collective"
    assert [word in head for word in ("bytes", "count", "type", "redop", "algbw", "busbw", "#wrong")] == [True] * 7
    assert rows[0].split()[:6] == ["all_reduce", "ring", "1024", "256", "float32", "sum"]
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_bench_when_it_cannot_be_then_says_all_that_is_wrong_and_measures_nothing(capfd: Any, tmp_path: Path) -> None:
    line = "bench --nproc 1 --collectives allreduce --algorithms rings --dtype float8 --op min --factor 1"
    line += " --min-bytes 9K --max-bytes 1K --backend glo --warm-up -1"
    assert main(line.split()) == 2
    said = capfd.readouterr().err
    assert "9 settings are invalid" in said
    assert "unknown backend 'glo': did you mean gloo?" in said
    assert "unknown algorithm 'rings': did you mean ring?" in said
    for size in ("many", "inf", "1e400", "nan"):
        assert main(["bench", "--max-bytes", size]) == 2
        assert f"--max-bytes is '{size}' but must be a number of bytes" in capfd.readouterr().err
    for factor in ("nan", "inf"):
        assert main(["bench", "--factor", factor]) == 2
        assert f"factor is {factor} but each size" in capfd.readouterr().err
    assert main(["bench", "--nproc", "2", "--device", "cuda"]) == 3
    with pytest.raises(Misuse, match=r"has the ending \.gif: use one of"):
        check_plot(tmp_path / "p.gif")
    with pytest.raises(Misuse, match="there is no folder"):
        check_plot(tmp_path / "no/p.svg")
    (tmp_path / "machine.json").write_text('{"version": 1, "links": [{"link": 3}]}')
    with pytest.raises(Misuse, match=r"machine\.json is no machine record \(TypeError\): name another --record"):
        read_costs(tmp_path / "machine.json")


def test_plot_when_matplotlib_is_missing_then_names_the_extra(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(EnvironmentLacks, match=r"pip install 'dure\[plot\]'"):
        check_plot(tmp_path / "p.svg")


@pytest.mark.parametrize(("alpha", "beta"), [(5e-5, 2e-9), (0.0, 1e-9), (1e-3, 0.0)])
def test_fit_when_times_lie_on_a_line_then_finds_it(alpha: float, beta: float) -> None:
    sizes = [8 * 4**i for i in range(12)]
    fitted_alpha, fitted_beta, error = fit_cost(sizes, [alpha + beta * size for size in sizes])
    assert (fitted_alpha, fitted_beta) == (pytest.approx(alpha, abs=1e-9), pytest.approx(beta, rel=1e-6, abs=1e-15))
    assert error < 1e-6


def test_fit_when_times_fall_with_size_then_nothing_is_negative() -> None:
    alpha, beta, _ = fit_cost([8, 80, 800], [3e-5, 2e-5, 1e-5])
    assert alpha > 0
    assert beta == 0
    alpha, beta, _ = fit_cost([100, 1000, 10000], [1e-8, 1e-5, 1e-4])
    assert alpha == 0
    assert beta > 0


def test_costs_when_one_size_was_measured_then_there_is_no_line() -> None:
    row = {"collective": "all_reduce", "algorithm": "ring", "num_bytes": 8, "seconds": 1e-5}
    assert link_costs([row], BenchSettings(), "cpu") == []


def test_record_when_the_state_folder_is_named_then_is_there(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "dure/machine.json"


def test_sizes_when_factor_does_not_meet_the_largest_then_it_is_included() -> None:
    assert list(sizes_between(8, 100, 4)) == [8, 32, 100]
    assert list(sizes_between(8, 8, 4)) == [8]


# --- the teaching view


@pytest.mark.parametrize(("name", "busiest", "total"), [("naive", 96, 384), ("star", 96, 192), ("ring", 48, 192)])
def test_explain_when_algorithms_are_compared_then_bytes_are_those_of_the_formulas(
    name: str, busiest: int, total: int
) -> None:
    lines = list(explain(name, world_size=4, num_elements=8))
    text = "\n".join(lines)
    assert f"busiest {busiest}: " in text
    assert f"total {total}: " in text
    assert "afterwards every rank has 100 104 108 112 116 120 124 128" in text
    sent = sum(
        int(e) - int(s) for line in lines if "->" in line for s, e in [line.split("[")[1].split(")")[0].split(":")]
    )
    assert sent * 4 == total


def test_explain_when_a_ring_is_shown_then_phases_follow_each_other(capsys: Any) -> None:
    assert main(["bench", "--explain", "ring", "--nproc", "2", "--elements", "4"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line and "ring:" not in line]
    assert lines[:7] == [
        "  rank 0 has 10 11 12 13",
        "  rank 1 has 20 21 22 23",
        "scatter-reduce, round 1",
        "  rank 0 -> rank 1  [0:2)     10 11",
        "  rank 1 -> rank 0  [2:4)     22 23",
        "all-gather, round 1",
        "  rank 0 -> rank 1  [2:4)     34 36",
    ]


def test_explain_when_there_is_nothing_to_show_then_says_why() -> None:
    with pytest.raises(SpecInvalid, match="the messages of 'shm' cannot be shown"):
        list(explain("shm", world_size=2, num_elements=4))
    with pytest.raises(SpecInvalid, match="there is no all-reduce algorithm 'rong'"):
        list(explain("rong", world_size=2, num_elements=4))
    with pytest.raises(SpecInvalid, match="give --nproc up to 16"):
        list(explain("ring", world_size=99, num_elements=4))
