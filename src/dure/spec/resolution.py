"""Resolution of a spec: flags over environment over TOML over the task's defaults, all faults at once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dure.documents import parse_json
from dure.errors import SpecInvalid
from dure.spec import old_names
from dure.spec.fields import (
    IDENTITY_FIELDS,
    LENGTH_FIELDS,
    NODE_FIELDS,
    OPTIONS_FIELDS,
    PLACE_FIELDS,
    RECORD_FIELDS,
    SETTINGS,
    TABLES,
    RunSpec,
    field_of,
    in_tables,
    is_bool_for_number,
    requirement,
    same_task,
    shown,
    with_own_names,
    without_tables,
)
from dure.spec.mesh import parse_mesh
from dure.spec.names import unknown_name, unknown_setting
from dure.spec.old_names import STRATEGIES_WITH
from dure.spec.own_options import OwnOptions
from dure.spec.rules import RULES
from dure.spec.sources import Source, config_source, environment_source, flag_source, task_source, without_place
from dure.spec.strategy_traits import StrategyTable, StrategyTraits, option_names


@dataclass(frozen=True, kw_only=True)
class ResolvedSpec:
    """Spec with the source of every setting."""

    spec: RunSpec
    origin: dict[str, str]
    """Source of each field, of each task option as `task_options.<name>`, and of each of the strategy's options as
    `options.<name>`: `flag --epochs`, `default`, ..."""
    notes: tuple[str, ...] = ()
    """Notes for the caller about deprecated names."""
    task_object: Mapping[str, Any] | None = None
    """Reason why class and options do not suffice to create the task again, and digests of its attributes; None if they
    do.
    """


@dataclass(kw_only=True)
class _Draft:
    """Settings before they are in a spec; faults are collected, not raised."""

    values: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    chosen: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def drop(self, name: str) -> None:
        self.values.pop(name, None)
        self.origin.pop(name, None)
        self.chosen.discard(name)


def resolve(
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config: Path | None,
    task_defaults: Mapping[str, Any],
    strategies: StrategyTable[StrategyTraits],
    base: RunSpec | None = None,
    total_devices: int | None = None,
) -> ResolvedSpec:
    """Merge the settings of a run: flags over `DURE_*` over TOML over the task's defaults.

    When a run is resumed, its own spec replaces the task's defaults. Values may be text (flags and the environment have
    nothing else); None counts as not given.

    Args:
        flags: Explicitly given settings by field name; `task_options` contains the task's own.
        environ: Environment variables of the process.
        config: A TOML file whose keys are field names, with a `[task_options]` table.
        task_defaults: `Task.defaults` of the task's class.
        strategies: Known strategies by name.
        base: Spec of the resumed run.
        total_devices: Devices of all hosts, if a launcher determines them and they are not `nproc` for each.

    Raises:
        SpecInvalid: Settings are invalid; contains every fault.
    """
    draft = _Draft()
    settings = {name: value for name, value in flags.items() if value is not None}
    file = config_source(config, draft.faults)
    environment = environment_source(environ, strategies, draft.faults)
    if base is None:
        ground = task_source(task_defaults, [settings, environment.values, file.values])
    else:
        # output concerns this terminal, not the run; nodes and checks concern this start
        left_out = {"quiet", "preflight", "accept_changes", "trust_task"}
        values = base.model_dump(exclude={*left_out, *NODE_FIELDS, *RECORD_FIELDS, *OPTIONS_FIELDS})
        ground = Source(values=values, origin_of=lambda name: "the resumed run", is_chosen=False)
        file, environment = without_place(file), without_place(environment)
    sources = (ground, file, environment, flag_source(settings))
    for source in sources:
        _overlay(draft, source, strategies)
    if total_devices is not None:
        draft.values["total_devices"] = total_devices
    _settle_strategy(draft, strategies, base)
    own = _own_options(draft, sources, strategies, base)
    spec = _validate(draft, strategies, own)
    if base is not None and spec is not None:
        draft.faults += _identity_faults(draft, spec, base)
    if draft.faults or spec is None:
        raise SpecInvalid(draft.faults)
    for name in (*SETTINGS, *RECORD_FIELDS):
        draft.origin.setdefault(name, "default")
    if own is not None:
        draft.origin |= {f"options.{name}": own.origin.get(name, "default") for name in spec.options}
    notes = (*draft.notes, *(() if own is None else own.notes))
    if fault := strategies.faults.get(str(spec.strategy)):
        notes = (*notes, fault)
    return ResolvedSpec(spec=spec, origin=draft.origin, notes=notes)


# --- merging


def _overlay(draft: _Draft, source: Source, strategies: Mapping[str, StrategyTraits]) -> None:
    """Override settings of lower sources by those of one source."""
    try:
        values = with_own_names(_with_names_of_now(draft, source), source.spell)
    except SpecInvalid as error:
        draft.faults += error.faults
        return
    for name, value in values.items():
        if value is None or name in STRATEGIES_WITH or (isinstance(value, Mapping) and name in strategies):
            continue  # options are examined once the strategy is known
        if name not in SETTINGS:
            known = [*SETTINGS, *source.more, *option_names(strategies)]
            fault = unknown_setting("setting", name, known, source.spell)
            draft.faults.append(f"{source.origin_of(name)}: {fault}")
        elif name == "task_options":
            _overlay_options(draft, source, value)
        elif name == "task" and isinstance(value, Mapping):
            draft.faults.append(
                f"{source.origin_of(name)}: task is a table: put the task's options under [task_options]"
            )
        else:
            draft.values[name], draft.origin[name] = value, source.origin_of(name)
            (draft.chosen.add if source.is_chosen else draft.chosen.discard)(name)
    _overlay_length(draft, source)


def _with_names_of_now(draft: _Draft, source: Source) -> dict[str, Any]:
    """Return a source's settings as separate entries, such as `checkpoint.keep`; old names get a note."""
    values = without_tables(source.values)
    for old, name in old_names.SETTINGS.items():
        value = values.pop(old, None)
        if value is None:
            continue
        if values.get(name) is not None:
            draft.faults.append(old_names.given_twice(source, old, name))
        values[name] = value
        draft.notes.append(old_names.note(source, old, name))
    return values


def _overlay_options(draft: _Draft, source: Source, options: Any) -> None:
    if not isinstance(options, Mapping):
        draft.faults.append(f"{source.origin_of('task_options')}: task_options is {options!r} but must be a table")
        return
    for name, value in options.items():
        key = f"task_options.{name}"
        draft.options[name], draft.origin[key] = value, source.origin_of(key)
        (draft.chosen.add if source.is_chosen else draft.chosen.discard)(key)


def _overlay_length(draft: _Draft, source: Source) -> None:
    given = [name for name in LENGTH_FIELDS if source.values.get(name) is not None]
    if len(given) == 2:
        draft.faults.append(
            f"{source.origin_of('epochs')} and {source.origin_of('samples')} both say how long to train: give one"
        )
    elif given:
        draft.drop("samples" if given == ["epochs"] else "epochs")


def _settle_strategy(draft: _Draft, strategies: Mapping[str, StrategyTraits], base: RunSpec | None) -> None:
    """Choose the strategy if none is given, and drop a resumed run's choices that conflict with new ones."""
    num_devices = _num_devices(draft)
    many = num_devices != 1
    traits = strategies.get(str(draft.values.get("strategy")))
    is_outgrown = base is not None and "strategy" not in draft.chosen and many and traits and not traits.many_devices
    if "strategy" not in draft.values or is_outgrown:
        wanted = "many" if many else "one"
        draft.values["strategy"] = next(name for name, row in strategies.items() if row.default_for == wanted)
        draft.origin["strategy"] = "default for one device" if not many else "default for several devices"
    traits = strategies.get(str(draft.values["strategy"]))
    for setting in {name for row in strategies.values() for name in row.settings}:
        if traits and setting not in traits.settings and setting not in draft.chosen:
            draft.drop(setting)
    is_other_world = base is not None and num_devices not in (None, base.num_devices)
    if (
        "mesh" in draft.values
        and "mesh" not in draft.chosen
        and (is_other_world or {"strategy", "nproc"} & draft.chosen)
    ):
        draft.drop("mesh")  # it was chosen for another number of ranks, or other axes
    if not any(name in draft.values for name in LENGTH_FIELDS):
        draft.values["epochs"] = 1.0


def _own_options(
    draft: _Draft, sources: Sequence[Source], strategies: Mapping[str, StrategyTraits], base: RunSpec | None
) -> OwnOptions | None:
    """Merge the chosen strategy's options; None if there is no such strategy."""
    strategy = str(draft.values["strategy"])
    if strategy not in strategies:
        return None
    own = OwnOptions(strategy=strategy, strategies=strategies)
    if base is not None:
        own.take_over(base)
    for source in sources:
        own.lay_over(source)
    return own


def _num_devices(draft: _Draft) -> int | None:
    """Return the devices of all hosts; None if their settings are invalid."""
    names = ("nproc", "nnodes", "total_devices")
    try:
        return RunSpec.model_validate(
            {"task": "-:-", **{name: draft.values[name] for name in names if name in draft.values}}
        ).num_devices
    except ValidationError:
        return None


# --- validation


def _validate(draft: _Draft, strategies: StrategyTable[StrategyTraits], own: OwnOptions | None) -> RunSpec | None:
    """Validate every setting by itself, then the valid ones together. Returns None if there is no task."""
    bad = {name for name, value in draft.values.items() if is_bool_for_number(field_of(name), value)}
    try:
        RunSpec.model_validate(in_tables({**draft.values, "task": draft.values.get("task", "-:-")}))
    except ValidationError as error:
        places = [detail["loc"] for detail in error.errors()]
        bad |= {".".join(map(str, place[: 2 if place[0] in TABLES else 1])) for place in places}
    draft.faults += [
        f"{draft.origin[name]}: {name} is {shown(value)} but must be {requirement(name)}"
        for name, value in draft.values.items()
        if name in bad
    ]
    strategy = draft.values["strategy"]
    if "strategy" not in bad and strategy not in strategies:
        bad.add("strategy")
        fault = strategies.faults.get(str(strategy)) or unknown_name("strategy", strategy, strategies)
        draft.faults.append(f"{draft.origin['strategy']}: {fault}")
    sound = {name: value for name, value in draft.values.items() if name not in bad}
    has_task = "task" in sound
    options, bad_options = ({}, set()) if own is None else own.validated()
    given = {"task": "-:-", "task_options": draft.options, "options": options, **sound}
    spec = RunSpec.model_validate(in_tables(given))
    draft.faults += [f"{_origin(draft, rule.blame)}: {rule.fault(spec)}" for rule in RULES if rule.breaks(spec, bad)]
    if own is not None:
        draft.faults += own.faults
        if not bad and not bad_options:
            faults = own.cls.of(spec).faults(spec)
            draft.faults += [f"{own.origin.get(blame) or _origin(draft, blame)}: {fault}" for blame, fault in faults]
    if "strategy" not in bad:
        draft.faults += _strategy_faults(draft, spec, strategies, bad)
    if not has_task and "task" not in bad:
        draft.faults.append("no task is given: name one, as in `dure train train.py:MyTask`")
    return spec if has_task else None


def _share_faults(draft: _Draft, spec: RunSpec, num_alike: int) -> list[str]:
    """Refuse a batch of which some devices would have no sample.

    Args:
        draft: The settings.
        spec: The same as a spec.
        num_alike: Number of devices that work on the same samples.
    """
    num_shares = spec.num_devices // num_alike
    if spec.global_batch_size >= num_shares:
        return []
    shares = f"{num_shares} devices" if num_alike == 1 else f"{num_shares} groups of {num_alike} devices"
    return [
        f"{_origin(draft, 'global_batch_size')}: global_batch_size is {spec.global_batch_size}, less than one sample"
        f" for each of {shares}: raise it to at least {num_shares} or lower nproc"
    ]


def _strategy_faults(
    draft: _Draft, spec: RunSpec, strategies: Mapping[str, StrategyTraits], bad: set[str]
) -> list[str]:
    """Return faults of the chosen strategy with these settings."""
    traits, faults = strategies[spec.strategy], []
    if not bad & {"nproc", "nnodes"} and spec.num_devices > 1 and not traits.many_devices:
        many = next(name for name, row in strategies.items() if row.default_for == "many")
        cure = "--nproc 1" if spec.num_nodes == 1 else "--nnodes 1 and --nproc 1"
        faults.append(
            f"{_origin(draft, 'strategy')}: strategy {spec.strategy} uses one device but {spec.counted_devices}:"
            f" choose {many}, or say {cure}"
        )
    if not bad & {"mesh", "nproc", "nnodes"}:
        try:
            axes = parse_mesh(
                spec.mesh, traits.mesh_axes, spec.num_devices, spec.counted_devices, main=traits.main_axis
            )
        except ValueError as error:
            faults.append(f"{_origin(draft, 'mesh')}: {error}")
        else:
            if "global_batch_size" not in bad:
                faults += _share_faults(draft, spec, math.prod(axes[axis] for axis in traits.alike_axes))
    for setting in sorted({name for row in strategies.values() for name in row.settings}):
        value = spec.setting(setting)
        is_default = value == field_of(setting).get_default(call_default_factory=True)
        if is_default or setting in traits.settings or setting in bad:
            continue
        first, *others = (name for name, row in strategies.items() if setting in row.settings)
        able = f"{first} (or {', '.join(others)})" if others else first
        faults.append(
            f"{_origin(draft, setting)}: {setting} is {value} but strategy {spec.strategy} cannot honour it:"
            f" choose --strategy {able}, or leave it out"
        )
    return faults


def _origin(draft: _Draft, name: str) -> str:
    return f"{draft.origin.get(name, 'default')}"


# --- resuming


def _identity_faults(draft: _Draft, spec: RunSpec, base: RunSpec) -> list[str]:
    """Return changes of settings that a resume does not permit."""
    faults = []
    for name in IDENTITY_FIELDS:
        now, then = getattr(spec, name), getattr(base, name)
        if name == "task_options":
            faults += _option_faults(draft, now, then)
        elif now != then and not (name == "task" and same_task(now, then)):
            faults.append(_identity_fault(draft.origin.get(name, "default"), name, now, then))
    for name in LENGTH_FIELDS:
        now, then = getattr(spec, name), getattr(base, name)
        if now is not None and then is not None and now < then:
            faults.append(
                f"{draft.origin[name]}: {name} is {now:g} but the run was begun with {then:g}:"
                " a resumed run may become longer, not shorter"
            )
    for name in PLACE_FIELDS:
        if name in draft.chosen and getattr(spec, name) != getattr(base, name):
            faults.append(f"{draft.origin[name]}: a resumed run stays in its folder: leave {name} out")
    return faults


def _option_faults(draft: _Draft, now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    faults = []
    for option, value in now.items():
        if option in then and _means(value, then[option]):
            now[option] = then[option]
        else:
            key = f"task_options.{option}"
            faults.append(_identity_fault(draft.origin[key], f"task option {option}", value, then.get(option, "unset")))
    return faults


def _means(value: Any, then: Any) -> bool:
    """Return whether an option equals the recorded one; a flag's text may represent a number or a boolean."""
    if isinstance(value, str) and not isinstance(then, str):
        try:
            value = parse_json(value.lower())
        except ValueError:
            return False
    return bool(value == then)


def _identity_fault(origin: str, name: str, now: Any, then: Any) -> str:
    return (
        f"{origin}: {name} is {shown(now)} but the run was begun with {shown(then)}, and it is part of what the run is:"
        " leave it out, or start a new run"
    )
