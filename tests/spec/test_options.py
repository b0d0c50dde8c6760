"""Options of strategies: sources, refusals, records, and their names of before."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import dure
from dure.cli import main
from dure.errors import SpecInvalid
from dure.records.run_dir import RunDir
from dure.spec import ResolvedSpec, RunSpec, read_record, resolve
from dure.spec.old_names import STRATEGIES_WITH, TRUTHS, option_name
from dure.strategies.data_parallel.options import DDPOptions
from dure.strategies.sharded.options import FSDPOptions
from dure.strategies.table import STRATEGIES
from tests.training.session.test_session import Small, train

OLD = Path(__file__).parents[1] / "samples" / "spec_before_options_of_strategies.json"
"""Record of `--strategy zero1 --compression topk --compression-fraction 0.5` when options were among the settings."""


def settle(
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    base: RunSpec | None = None,
) -> ResolvedSpec:
    return resolve(
        flags={**({} if base else {"task": "train.py:Digits"}), **flags},
        environ=environ or {},
        config=config,
        task_defaults=defaults or {},
        strategies=STRATEGIES,
        base=base,
    )


def fault_of(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(SpecInvalid, match=r".") as caught:
        settle(*args, **kwargs)
    (fault,) = caught.value.faults
    return fault


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


# --- the models


@pytest.mark.parametrize("name", STRATEGIES)
def test_option_when_listed_then_it_has_help_and_a_sound_default(name):
    cls = STRATEGIES[name].option_class()
    assert cls.model_validate(cls().model_dump(mode="json")) == cls()
    assert all(info.description and not info.is_required() for info in cls.model_fields.values())
    assert not set(cls.model_fields) & set(RunSpec.model_fields)


# --- the sources


def test_option_when_given_in_every_source_then_the_highest_wins(tmp_path):
    everywhere: dict[str, Any] = {
        "flags": {"strategy": "averaging", "averaging": {"average_every": "1"}},
        "environ": {"DURE_AVERAGING__AVERAGE_EVERY": "2"},
        "config": toml(tmp_path, "[averaging]\naverage_every = 3"),
        "defaults": {"averaging": {"average_every": 4}},
    }
    seen = []
    for source in list(everywhere):
        resolved = settle(**everywhere)
        seen.append((resolved.spec.options["average_every"], resolved.origin["options.average_every"]))
        everywhere[source] = {"strategy": "averaging"} if source == "flags" else None
    resolved = settle(**everywhere)
    assert [*seen, (resolved.spec.options["average_every"], resolved.origin["options.average_every"])] == [
        (1, "flag --averaging.average-every"),
        (2, "environment DURE_AVERAGING__AVERAGE_EVERY"),
        (3, str(tmp_path / "run.toml")),
        (4, "Digits.defaults"),
        (16, "default"),
    ]


def test_tables_of_several_strategies_then_only_that_of_the_chosen_one_counts(tmp_path):
    config = toml(tmp_path, '[fsdp]\nunits = "blocks.*"\n[pipeline]\nschedule = "gpipe"')
    environ = {"DURE_FSDP__CPU_OFFLOAD": "yes", "DURE_DDP__BUCKET_BYTES": "7"}
    fsdp = settle({"strategy": "fsdp"}, config=config, environ=environ).spec.options
    assert (fsdp["units"], fsdp["cpu_offload"]) == ("blocks.*", True)
    assert settle({"strategy": "pipeline"}, config=config, environ=environ).spec.options["schedule"] == "gpipe"
    assert settle({}, config=config, environ=environ).spec.options == {}


def test_none_as_an_option_then_counts_as_not_given():
    assert settle({"strategy": "pipeline", "pipeline": {"cuts": None, "schedule": None}}).spec.options["cuts"] is None


# --- what cannot be


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            {"strategy": "averaging", "ddp": {"compression": "int8"}},
            "flag --ddp.compression: strategy averaging has no option compression: choose --strategy ddp (or ring_ddp,"
            " zero1), or leave it out",
        ),
        (
            {"strategy": "zero1", "ddp": {"compression": "int8"}},
            "flag --ddp.compression: the strategy is zero1: write --zero1.compression, or choose --strategy ddp",
        ),
        (
            {"strategy": "fsdp", "fsdp": {"unit": "0"}},
            "flag --fsdp.unit: unknown option '--fsdp.unit': did you mean --fsdp.units? known: ",
        ),
        (
            {"strategy": "ddp", "ddp": {"cuts": "0"}},
            "flag --ddp.cuts: unknown option '--ddp.cuts': did you mean --ddp.bucket-bytes? known: ",
        ),
        ({"strategy": "single", "single": {"x": 1}}, "flag --single.x: unknown option '--single.x': there is none"),
        (
            {"strategy": "ring_ddp", "ring_ddp": {"message_size": 0}},
            "flag --ring-ddp.message-size: message_size is 0 but must be a whole number above 0",
        ),
        (
            {"strategy": "ring_ddp", "ring_ddp": {"message_size": True}},
            "flag --ring-ddp.message-size: message_size is True but must be a whole number above 0",
        ),
        (
            {"strategy": "ddp", "ddp": {"bucket_bytes": 10**20}},
            f"flag --ddp.bucket-bytes: bucket_bytes is {10**20} but must be a whole number above 0 and of at most ",
        ),
        ({"fsdp": True}, "flag --fsdp: unknown setting 'fsdp': use --strategy, as fsdp or zero1: they divide what"),
        ({"reshard_after_foward": 1}, "flag --reshard-after-foward: unknown setting 'reshard_after_foward': did you"),
    ],
)
def test_option_when_it_cannot_be_then_one_sentence_says_source_rule_and_cure(flags, fault):
    assert fault_of(flags).startswith(fault)


def test_option_of_others_then_they_are_named():
    assert fault_of({"strategy": "ddp", "ddp": {"cuts": "0"}}).endswith(
        "; cuts is an option of model_parallel (or pipeline, rpc_model)"
    )


def test_variable_of_no_option_then_the_nearest_is_named():
    assert "did you mean DURE_FSDP__UNITS" in fault_of({}, environ={"DURE_FSPD__UNITS": "0"})
    fault = fault_of({"strategy": "fsdp"}, environ={"DURE_FSDP__UNIT": "0"})
    assert fault.startswith("environment DURE_FSDP__UNIT: unknown option 'DURE_FSDP__UNIT': did you mean DURE_")


# --- going on


def test_resume_then_options_stay_and_under_another_strategy_those_that_it_has_too():
    base = settle({"strategy": "ddp", "nproc": 2, "ddp": {"compression": "topk", "bucket_bytes": 99}}).spec
    same = settle({}, base=base)
    assert (same.spec.options, same.origin["options.bucket_bytes"]) == (base.options, "the resumed run")
    ring = settle({"strategy": "ring_ddp"}, base=base).spec.options
    assert (ring["compression"], "bucket_bytes" in ring) == ("topk", False)
    assert settle({"strategy": "averaging"}, base=base).spec.options == {"average_every": 16, "warmup_steps": 0}


# --- names of before


@pytest.mark.parametrize(("old", "strategy"), [(old, each) for old, all_ in STRATEGIES_WITH.items() for each in all_])
def test_old_name_then_its_strategies_still_have_that_option(old, strategy):
    info = STRATEGIES[strategy].option_class().model_fields[option_name(old)]
    assert (old in TRUTHS) == (info.annotation is bool)


def test_old_names_in_every_source_then_they_are_understood_and_the_new_ones_named(tmp_path):
    config = toml(tmp_path, "cpu_offload = true")
    resolved = settle(
        {"strategy": "fsdp", "fsdp_units": "0"},
        config=config,
        environ={"DURE_ACTIVATION_CHECKPOINTING": "1"},
        defaults={"reshard_after_forward": False},
    )
    assert resolved.spec.options == FSDPOptions().model_dump() | {
        "units": "0",
        "cpu_offload": True,
        "activation_checkpointing": True,
        "reshard_after_forward": False,
    }
    end = "now; the old name is understood in this version only"
    assert sorted(resolved.notes) == sorted(
        [
            f"flag --fsdp-units is called --fsdp.units {end}",
            f"{config}: cpu_offload is called fsdp.cpu_offload {end}",
            f"environment DURE_ACTIVATION_CHECKPOINTING is called DURE_FSDP__ACTIVATION_CHECKPOINTING {end}",
            f"Digits.defaults: reshard_after_forward is called fsdp.reshard_after_forward {end}",
        ]
    )


def test_old_name_over_a_new_one_then_the_higher_source_wins(tmp_path):
    config = toml(tmp_path, "[fsdp]\nunits = '1'")
    assert settle({"strategy": "fsdp", "fsdp_units": "0"}, config=config).spec.options["units"] == "0"
    config = toml(tmp_path, "fsdp_units = '1'")
    assert settle({"strategy": "fsdp", "fsdp": {"units": "0"}}, config=config).spec.options["units"] == "0"
    assert "--fsdp-units is the old name of --fsdp.units, which is given too" in fault_of(
        {"strategy": "fsdp", "fsdp_units": "0", "fsdp": {"units": "1"}}
    )


def test_old_name_where_the_strategy_has_no_such_option_then_it_is_refused_as_before():
    assert fault_of({"strategy": "ddp", "outer_lr": 0.5}) == (
        "flag --outer-lr: strategy ddp has no option outer_lr: choose --strategy diloco, or leave it out"
    )
    # a value that changed nothing was never refused, nor were those that every strategy took
    settle({"strategy": "ddp", "sync": True, "outer_lr": None})
    settle({"strategy": "single", "bucket_bytes": 7, "find_unused_parameters": True})


def test_record_of_before_then_it_is_read_as_it_was_meant():
    spec = read_record(json.loads(OLD.read_text())["spec"])
    assert (spec.strategy, spec.num_devices) == ("zero1", 2)
    resumed = settle({}, base=spec).spec
    assert resumed.options == DDPOptions().model_dump() | {"compression": "topk", "compression_fraction": 0.5}


def test_run_of_before_then_it_goes_on_and_is_evaluated(tmp_path):
    settings = {"device": "cpu", "threads": 1, "quiet": True, "start": "fork"}
    summary = train(Small, tmp_path, strategy="zero1", nproc=2, name="run", **settings)
    run = RunDir.open(Path(summary.run))
    now, then = run.read_json("spec.json"), json.loads(OLD.read_text())
    kept = ("task", "task_options", "runs_dir", "name", "global_batch_size", "epochs", "samples", "start")
    same = {name: now["spec"][name] for name in kept}
    run.write_json("spec.json", {**now, "spec": {**then["spec"], **same}, "origin": then["origin"]})
    again = dure.train(Small, resume=run.path, epochs=4, quiet=True)
    assert again.status == "completed"
    assert RunDir.open(run.path).read_spec().options["compression"] == "topk"
    assert any("--zero1.compression: the gradient is approximated" in text for text in again.not_preserved)


def test_old_keyword_then_a_sentence_names_the_new_one_unless_quiet(tmp_path, capfd):
    train(Small, tmp_path, bucket_bytes=100, quiet=False, strategy="ddp", nproc=2, start="fork", device="cpu")
    assert 'dure: argument bucket_bytes is called ddp={"bucket_bytes": ...} now; the old' in capfd.readouterr().err
    train(Small, tmp_path, bucket_bytes=100, strategy="ddp", nproc=2, start="fork", device="cpu")
    assert capfd.readouterr().err == ""


TASK = f"{Path(__file__).parents[1] / 'training/session/test_session.py'}:Small"


def test_old_flag_then_a_sentence_names_the_new_one(capsys):
    words = ["train", TASK, "--strategy", "parameter_server", "--nproc", "2", "--show-spec", "--json"]
    assert main([*words, "--no-sync", "--servers", "1", "--transport=rpc"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["spec"]["options"] == {
        "servers": 1,
        "transport": "rpc",
        "sync": False,
        "staleness": None,
    }
    assert "dure: flag --sync is called --parameter-server.sync now;" in shown.err
    assert len(shown.err.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--strategy fsdp --no-fsdp.reshard-after-forward", {"reshard_after_forward": False}),
        ("--strategy fsdp --fsdp.reshard-after-forward false --fsdp.cpu-offload", {"cpu_offload": True}),
        ("--strategy=ring_ddp --ring_ddp.message_size=5", {"message_size": 5}),
        ("--ring-ddp.message-size 5 --strategy ring_ddp", {"message_size": 5}),
    ],
)
def test_flag_of_an_option_in_any_form_then_it_is_read(words, options, capsys):
    assert main(["train", *words.split(), TASK, "--nproc", "2", "--show-spec", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["spec"]["options"]
    assert {name: shown[name] for name in options} == options


# --- settings in tables


def test_setting_in_a_table_when_given_in_every_source_then_the_highest_wins(tmp_path):
    everywhere: dict[str, Any] = {
        "flags": {"checkpoint": {"keep": "1"}},
        "environ": {"DURE_CHECKPOINT__KEEP": "2"},
        "config": toml(tmp_path, "[checkpoint]\nkeep = 3"),
        "defaults": {"checkpoint": {"keep": 4}},
    }
    seen = []
    for source in list(everywhere):
        resolved = settle(**everywhere)
        seen.append((resolved.spec.checkpoint.keep, resolved.origin["checkpoint.keep"]))
        everywhere[source] = {} if source == "flags" else None
    resolved = settle(**everywhere)
    assert [*seen, (resolved.spec.checkpoint.keep, resolved.origin["checkpoint.keep"])] == [
        (1, "flag --checkpoint.keep"),
        (2, "environment DURE_CHECKPOINT__KEEP"),
        (3, str(tmp_path / "run.toml")),
        (4, "Digits.defaults"),
        (2, "default"),
    ]


def test_settings_of_a_table_in_several_sources_then_they_merge(tmp_path):
    config = toml(tmp_path, "[checkpoint]\nevery_samples = 3\nkeep = 9")
    checkpoint = settle({"checkpoint": {"keep": 5}}, config=config).spec.checkpoint
    assert (checkpoint.every_samples, checkpoint.keep, checkpoint.background) == (3, 5, True)
    base = settle({"checkpoint": {"keep": 5}}, config=config).spec
    assert settle({}, base=base).spec.checkpoint == base.checkpoint


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            {"checkpoint": {"keep": 0}},
            "flag --checkpoint.keep: checkpoint.keep is 0 but must be a whole number above 0",
        ),
        ({"checkpoint": {"keep": True}}, "flag --checkpoint.keep: checkpoint.keep is True but must be a whole number"),
        (
            {"checkpoint": {"every_sample": 0}},
            "flag --checkpoint.every-sample: unknown setting 'checkpoint.every_sample': did you mean --",
        ),
        (
            {"checkpoint": "runs/x"},
            "flag --checkpoint: unknown setting 'checkpoint': use --resume, with a run's folder",
        ),
        (
            {"checkpoint": {"keep": 3}, "keep_checkpoints": 4},
            "flag --keep-checkpoints: --keep-checkpoints is the old name of --checkpoint.keep, which is given too",
        ),
    ],
)
def test_setting_in_a_table_when_it_cannot_be_then_one_sentence_says_source_rule_and_cure(flags, fault):
    assert fault_of(flags).startswith(fault)


def test_old_names_of_settings_then_they_are_understood_and_the_new_ones_named(tmp_path):
    config = toml(tmp_path, "checkpoint_every_samples = 7")
    environ = {"DURE_CHECKPOINT_ASYNC": "no"}
    resolved = settle({"keep_checkpoints": "5"}, config=config, environ=environ)
    checkpoint = resolved.spec.checkpoint
    assert (checkpoint.keep, checkpoint.every_samples, checkpoint.background) == (5, 7, False)
    end = "now; the old name is understood in this version only"
    assert sorted(resolved.notes) == sorted(
        [
            f"flag --keep-checkpoints is called --checkpoint.keep {end}",
            f"{config}: checkpoint_every_samples is called checkpoint.every_samples {end}",
            f"environment DURE_CHECKPOINT_ASYNC is called DURE_CHECKPOINT__BACKGROUND {end}",
        ]
    )
    record = {**json.loads(OLD.read_text())["spec"], "keep_checkpoints": 7}
    assert read_record(record).checkpoint.keep == 7
    assert read_record(resolved.spec.model_dump(mode="json")) == resolved.spec


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--no-checkpoint.background --checkpoint.keep=3", {"background": False, "keep": 3}),
        ("--no-checkpoint-async --keep-checkpoints 3", {"background": False, "keep": 3}),
        ("--checkpoint.background no --checkpoint.every_samples 4", {"background": False, "every_samples": 4}),
    ],
)
def test_flag_of_a_setting_in_a_table_in_any_form_then_it_is_read(words, settings, capsys):
    assert main(["train", TASK, *words.split(), "--show-spec", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["spec"]["checkpoint"]
    assert {name: shown[name] for name in settings} == settings
