"""The settings of a run: precedence, faults all at once, and what a resume may change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dure.errors import SpecInvalid
from dure.spec import (
    GROUPS,
    IDENTITY_FIELDS,
    LENGTH_FIELDS,
    OTHER_NAMES,
    PLACE_FIELDS,
    SETTINGS,
    ResolvedSpec,
    RunSpec,
    field_of,
    flag_name,
    option_names,
    requirement,
    resolve,
    same_task,
)
from dure.spec.foreign_names import _SENTENCES, place_of
from dure.strategies.table import STRATEGIES


def settle(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    base: RunSpec | None = None,
    total_devices: int | None = None,
) -> ResolvedSpec:
    task = {} if base else {"task": "train.py:Digits"}
    return resolve(
        flags={**task, **(flags or {})},
        environ=environ or {},
        config=config,
        task_defaults=defaults or {},
        strategies=STRATEGIES,
        base=base,
        total_devices=total_devices,
    )


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def faults_of(*args: Any, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(SpecInvalid, match=r".") as caught:
        settle(*args, **kwargs)
    return caught.value.faults


# --- precedence


def test_value_when_given_in_every_source_then_the_highest_wins(tmp_path: Path) -> None:
    everywhere: dict[str, Any] = {
        "flags": {"seed": "1"},
        "environ": {"DURE_SEED": "2"},
        "config": toml(tmp_path, "seed = 3"),
        "defaults": {"seed": 4},
    }
    seen = []
    for source in list(everywhere):
        resolved = settle(**everywhere)
        seen.append((resolved.spec.seed, resolved.origin["seed"]))
        del everywhere[source]
    resolved = settle()
    assert [*seen, (resolved.spec.seed, resolved.origin["seed"])] == [
        (1, "flag --seed"),
        (2, "environment DURE_SEED"),
        (3, str(tmp_path / "run.toml")),
        (4, "Digits.defaults"),
        (0, "default"),
    ]


def test_origin_when_resolved_then_names_a_source_of_every_field() -> None:
    assert set(SETTINGS) <= set(settle({"epochs": 3}).origin)


def test_none_when_given_then_counts_as_not_given() -> None:
    assert settle({"seed": None}, defaults={"seed": 4}).spec.seed == 4


def test_empty_variable_when_set_then_counts_as_not_set() -> None:
    assert settle(environ={"DURE_SEED": ""}).spec.seed == 0


@pytest.mark.parametrize(("text", "value"), [("true", True), ("0", False), ("no", False), ("ON", True)])
def test_environment_truth_when_written_as_people_do_then_is_read(text: str, value: bool) -> None:
    assert settle(environ={"DURE_SHUFFLE": text}).spec.shuffle is value


def test_task_options_when_in_several_sources_then_merge_by_option(tmp_path: Path) -> None:
    config = toml(tmp_path, "[task_options]\nhidden = 32\nlayers = 2")
    resolved = settle({"task_options": {"hidden": "64"}}, config=config, environ={"DURE_TASK_OPTIONS": '{"drop": 0.5}'})
    assert resolved.spec.task_options == {"hidden": "64", "layers": 2, "drop": 0.5}
    assert resolved.origin["task_options.hidden"] == "flag --task.hidden"
    assert resolved.origin["task_options.layers"] == str(config)
    assert resolved.origin["task_options.drop"] == "environment DURE_TASK_OPTIONS"


@pytest.mark.parametrize(("nproc", "strategy"), [(1, "single"), ("1", "single"), (2, "ddp"), ("3", "ddp")])
def test_strategy_when_not_given_then_follows_from_nproc(nproc: Any, strategy: str) -> None:
    assert settle({"nproc": nproc}).spec.strategy == strategy


def test_length_when_not_given_then_is_one_epoch() -> None:
    spec = settle().spec
    assert (spec.epochs, spec.samples) == (1.0, None)


def test_length_when_a_higher_source_counts_otherwise_then_the_lower_one_is_set_aside() -> None:
    resolved = settle({"samples": 500}, defaults={"epochs": 10})
    assert (resolved.spec.epochs, resolved.spec.samples) == (None, 500)
    assert resolved.origin["epochs"] == "default"


# --- what cannot be


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"epochs": 1, "samples": 64}, "flag --epochs and flag --samples both say how long to train: give one"),
        ({"epochs": "many"}, "flag --epochs: epochs is 'many' but must be a number above 0"),
        ({"epochs": float("inf")}, "flag --epochs: epochs is inf but must be a number above 0"),
        (
            {"timeout_seconds": 1e10},
            "flag --timeout-seconds: timeout_seconds is 10000000000.0 but must be a number above 0 and of at most",
        ),
        (
            {"num_workers": 4097},
            "flag --num-workers: num_workers is 4097 but must be a whole number of at least 0 and of at most 4096",
        ),
        ({"nproc": 4097}, "flag --nproc: nproc is 4097 but must be a whole number above 0 and of at most 4096"),
        ({"threads": 4097}, "flag --threads: threads is 4097 but must be a whole number above 0 and of at most 4096"),
        ({"runs_dir": "a\0b"}, "flag --runs-dir: runs_dir is 'a\\x00b' but must be a path"),
        ({"faults": "a\0b"}, "flag --faults: faults is 'a\\x00b' but must be a path"),
        ({"seed": -1}, f"flag --seed: seed is -1 but must be a whole number of at least 0 and below {2**63}"),
        ({"seed": True}, f"flag --seed: seed is True but must be a whole number of at least 0 and below {2**63}"),
        ({"precision": "fp8"}, "flag --precision: precision is 'fp8' but must be one of fp32, tf32, bf16, fp16"),
        ({"compile": "maybe"}, "flag --compile: compile is 'maybe' but must be true or false"),
        (
            {"compile_mode": "default"},
            "flag --compile-mode: compile_mode is default but nothing is compiled: set",
        ),
        (
            {"prefetch_factor": 4},
            "flag --prefetch-factor: prefetch_factor is 4 but there is no loader process",
        ),
        ({"task": 3}, "argument task: task is 3 but must be text"),
        ({"name": "../x"}, "flag --name: name is '../x' but must be 1 to 64 letters, digits"),
        (
            {"microbatch_size": 65},
            "flag --microbatch-size: microbatch_size is 65, more than the global_batch_size of 64",
        ),
        ({"nproc": 65}, "default: global_batch_size is 64, less than one sample for each of 65 devices: raise it"),
        (
            {"precision": "fp16", "fsdp": {"cpu_offload": True}, "strategy": "fsdp"},
            "flag --precision: precision is fp16 and cpu_offload is set, but torch's GradScaler would",
        ),
        ({"strategy": "single", "nproc": 2}, "flag --strategy: strategy single uses one device but nproc is 2: choose"),
        ({"balanced_dp": {"device0_share": 0.2}}, "flag --balanced-dp.device0-share: strategy single has no option"),
        ({"backend": "nccl", "device": "cpu"}, "flag --backend: backend nccl cannot reach device cpu: choose gloo"),
        ({"strategy": "dpp"}, "flag --strategy: unknown strategy 'dpp': did you mean dp? known: dp, ddp, "),
        ({"epoch": 3}, "flag --epoch: unknown setting 'epoch': use --epochs"),
        ({"task": None}, "no task is given: name one"),
    ],
)
def test_setting_when_it_cannot_be_then_one_sentence_says_source_rule_and_cure(flags: Any, fault: str) -> None:
    faults = faults_of(flags)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_faults_when_in_every_source_then_all_are_reported_at_once(tmp_path: Path) -> None:
    faults = faults_of(
        {"nproc": "two", "strategy": "dddp"},
        environ={"DURE_EPOCH": "3", "DURE_THREADS": "0"},
        config=toml(tmp_path, "batch_size = 3\nmicrobatch_size = 100\n[task_options]\nhidden = 3"),
        defaults={"lr": 0.1},
    )
    expected = ("two", "dddp", "DURE_EPOCH'", "DURE_THREADS", "'batch_size'", "microbatch_size is 100", "'lr'")
    assert len(faults) == len(expected)
    assert all(any(word in fault for fault in faults) for word in expected)


def test_rule_over_two_settings_when_one_is_faulty_by_itself_then_is_not_reported_too() -> None:
    assert len(faults_of({"global_batch_size": "abc", "nproc": 100})) == 1


def test_unknown_variable_when_near_a_known_one_then_is_guessed() -> None:
    (fault,) = faults_of(environ={"DURE_GLOBAL_BATCHSIZE": "3"})
    near = "DURE_GLOBAL_BATCH_SIZE, DURE_EVAL_BATCH_SIZE or DURE_MICROBATCH_SIZE"
    assert fault == f"unknown environment variable 'DURE_GLOBAL_BATCHSIZE': did you mean {near}?"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"flags": {"gpus": 2}}, "flag --gpus: unknown setting 'gpus': use --nproc"),
        ({"environ": {"DURE_GPUS": "2"}}, "unknown environment variable 'DURE_GPUS': use DURE_NPROC"),
        (
            {"defaults": {"max_steps": 2}},
            "unknown setting 'max_steps': use samples, which is steps x global_batch_size",
        ),
        (
            {"flags": {"lr": 1}},
            "unknown setting 'lr': the optimiser is the task's: set it in build_optimizer, and make",
        ),
        ({"flags": {"ckpt": "x"}}, "unknown setting 'ckpt': use --resume, with a run's folder"),
        ({"flags": {"epohcs": 1}}, "unknown setting 'epohcs': did you mean --epochs?"),
        ({"flags": {"zzz": 1}}, "unknown setting 'zzz': there is no similar name"),
    ],
)
def test_setting_when_another_tool_has_it_then_what_takes_its_place_is_said_as_the_source_writes_it(
    source: Any, said: str
) -> None:
    (fault,) = faults_of(**source)
    assert said in fault
    assert len(fault) < 200


def test_foreign_names_when_read_then_none_is_a_setting_and_each_place_is_one() -> None:
    names = {*SETTINGS, *OTHER_NAMES, *option_names(STRATEGIES), "resume", "show_spec"}
    assert not names & set(_SENTENCES)
    for name in _SENTENCES:
        assert place_of(name, names, flag_name) is not None, name


def test_internal_variable_when_set_then_is_no_setting() -> None:
    assert settle(environ={"DURE_INTERNAL_ROUND": "3", "PATH": "/bin"}).spec.seed == 0


def test_config_when_its_syntax_is_wrong_then_says_the_line(tmp_path: Path) -> None:
    (fault,) = faults_of(config=toml(tmp_path, "seed = 3\nepochs == 4\n"))
    assert fault.startswith(f"{tmp_path / 'run.toml'} is not valid TOML: ")
    assert "line 2" in fault


def test_config_when_missing_or_no_text_then_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert "cannot be read: No such file" in faults_of(config=tmp_path / "none.toml")[0]
    assert "is not UTF-8 text" in faults_of(config=tmp_path / "run.toml")[0]


def test_config_when_task_is_a_table_then_names_the_right_table(tmp_path: Path) -> None:
    config = toml(tmp_path, "[task]\nhidden = 3")
    with pytest.raises(SpecInvalid, match=r"task is a table: put the task's options under \[task_options\]"):
        resolve(flags={"task": "train.py:Digits"}, environ={}, config=config, task_defaults={}, strategies=STRATEGIES)


# --- resuming


@pytest.fixture
def begun() -> RunSpec:
    return settle({"epochs": 5, "seed": 7, "task_options": {"hidden": 64, "bias": True}, "strategy": "ddp"}).spec


def test_resume_when_nothing_is_given_then_the_spec_is_the_runs_own(begun: RunSpec) -> None:
    resolved = settle(base=begun)
    assert resolved.spec == begun
    assert resolved.origin["seed"] == "the resumed run"


def test_resume_when_execution_changes_then_it_may(begun: RunSpec) -> None:
    spec = settle({"nproc": 4, "strategy": "dp", "microbatch_size": 8, "epochs": 9}, base=begun).spec
    assert (spec.nproc, spec.strategy, spec.microbatch_size, spec.epochs) == (4, "dp", 8, 9)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"global_batch_size": 65},
        {"shuffle": False},
        {"drop_last": True},
        {"clip_norm": 1.0},
        {"task": "train.py:Other"},
        {"task_options": {"hidden": 65}},
        {"task_options": {"new": 1}},
    ],
)
def test_resume_when_identity_changes_then_is_refused_with_the_reason(begun: RunSpec, change: Any) -> None:
    with pytest.raises(SpecInvalid, match="it is part of what the run is: leave it out, or start a new run"):
        settle(change, base=begun)


def test_resume_when_identity_is_repeated_then_is_accepted(begun: RunSpec) -> None:
    flags = {"task": "./train.py:Digits", "seed": "7", "task_options": {"hidden": "64", "bias": "True"}}
    assert settle(flags, base=begun).spec.task_options == begun.task_options


def test_resume_when_shorter_then_is_refused(begun: RunSpec) -> None:
    with pytest.raises(SpecInvalid, match="epochs is 4 but the run was begun with 5: a resumed run may become longer"):
        settle({"epochs": 4}, base=begun)


def test_resume_when_spread_wider_then_the_one_device_strategy_gives_way(begun: RunSpec) -> None:
    single = begun.model_copy(update={"strategy": "single"})
    assert settle({"nproc": 2}, base=single).spec.strategy == "ddp"


def test_resume_when_strategy_changes_then_the_old_ones_own_settings_are_left_behind(begun: RunSpec) -> None:
    balanced = begun.model_copy(update={"strategy": "balanced_dp", "options": {"device0_share": 0.3}})
    assert "device0_share" not in settle({"strategy": "ddp"}, base=balanced).spec.options


def test_resume_when_the_place_is_given_then_flags_are_refused_and_the_shells_habit_ignored(begun: RunSpec) -> None:
    assert settle(environ={"DURE_RUNS_DIR": "/elsewhere"}, base=begun).spec.runs_dir == Path("runs")
    with pytest.raises(SpecInvalid, match="a resumed run stays in its folder: leave runs_dir out"):
        settle({"runs_dir": "/elsewhere"}, base=begun)


# --- the tables


def test_groups_when_read_then_hold_every_field_once() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(SETTINGS)


def test_kinds_of_fields_when_read_then_each_is_a_setting_of_one_kind() -> None:
    kinds = (*IDENTITY_FIELDS, *LENGTH_FIELDS, *PLACE_FIELDS)
    assert set(kinds) <= set(SETTINGS)
    assert len(set(kinds)) == len(kinds)


def test_fields_when_listed_then_each_has_help_and_a_rule_in_words() -> None:
    assert all(field_of(name).description and requirement(name) for name in SETTINGS)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a.py:T", "./a.py:T", True),
        ("a.py:T", "a.py:U", False),
        ("p.m:T", "p.m:T", True),
        ("p.m:T", "m.py:T", False),
        ("b/test_spec.py:T", f"{__file__}:T", False),
        ("new/a.py:T", "/no/such/folder/a.py:T", True),
    ],
)
def test_task_references_when_compared_then_paths_may_be_spelled_differently(one: str, other: str, same: bool) -> None:
    assert same_task(one, other) is same


def test_resume_when_the_run_was_on_several_hosts_then_where_they_were_is_not_kept(begun: RunSpec) -> None:
    base = begun.model_copy(update={"nnodes": "2", "node_rank": 1, "rendezvous": "10.0.0.1:29400"})
    spec = settle(base=base).spec
    assert (spec.nnodes, spec.node_rank, spec.rendezvous) == ("1", None, None)


def test_resume_when_the_run_began_with_a_preflight_then_that_is_not_kept(begun: RunSpec) -> None:
    assert settle(base=begun.model_copy(update={"preflight": True})).spec.preflight is False


# --- devices of each host, and of all


@pytest.mark.parametrize(
    ("flags", "world_size", "strategy"),
    [
        ({"nproc": 4}, 4, "ddp"),
        ({"nproc": 4, "nnodes": 2}, 8, "ddp"),
        ({"nnodes": "2"}, 2, "ddp"),
        ({"nproc": 2, "nnodes": "1:4"}, 8, "ddp"),
        ({"nproc": 1, "nnodes": "1:1"}, 1, "single"),
    ],
)
def test_world_size_when_there_are_hosts_then_each_has_nproc(flags: Any, world_size: int, strategy: str) -> None:
    spec = settle(flags).spec
    assert (spec.num_devices, spec.strategy) == (world_size, strategy)


def test_nproc_when_it_is_given_by_its_other_name_in_any_source_then_it_is_that(tmp_path: Path) -> None:
    everywhere = (
        {"flags": {"nproc_per_node": "3"}},
        {"environ": {"DURE_NPROC_PER_NODE": "3"}},
        {"config": toml(tmp_path, "nproc_per_node = 3")},
    )
    assert [settle(**source).spec.nproc for source in everywhere] == [3, 3, 3]
    assert settle({"nproc": 2}, environ={"DURE_NPROC_PER_NODE": "3"}).spec.nproc == 2
    (fault,) = faults_of(environ={"DURE_NPROC": "2", "DURE_NPROC_PER_NODE": "3"})
    assert fault == "DURE_NPROC is 2 but DURE_NPROC_PER_NODE, its other name, is 3: give one of them"


def test_fact_of_the_record_when_it_is_given_as_a_setting_then_it_is_unknown() -> None:
    assert "unknown setting 'total_devices'" in faults_of({"total_devices": 4})[0]
    assert "'DURE_TOTAL_DEVICES'" in faults_of(environ={"DURE_TOTAL_DEVICES": "4"})[0]


def test_mesh_when_the_run_goes_on_on_as_many_hosts_then_it_stays_and_otherwise_gives_way() -> None:
    flags = {"nproc": 2, "nnodes": 2, "strategy": "fsdp", "mesh": "replica=2,shard=2"}
    begun = settle(flags).spec
    assert settle({"nnodes": 2}, base=begun).spec.mesh == "replica=2,shard=2"
    assert settle(base=begun).spec.mesh is None
    with pytest.raises(SpecInvalid, match=r"the world size is 6 \(nnodes 3 x nproc 2\) but mesh replica 2 x shard 2"):
        settle({**flags, "nnodes": 3})
