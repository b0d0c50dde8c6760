"""Resolution of a spec: flags over environment over TOML over the task's defaults, all faults at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dure import documents
from dure.documents import DocumentInvalid, parse_json
from dure.errors import SpecInvalid
from dure.spec.fields import (
    IDENTITY_FIELDS,
    LENGTH_FIELDS,
    NODE_FIELDS,
    OTHER_NAMES,
    PLACE_FIELDS,
    RECORD_FIELDS,
    SETTINGS,
    RunSpec,
    StrategyTraits,
    flag_name,
    kinds,
    requirement,
    same_task,
    with_own_names,
)
from dure.spec.mesh import parse_mesh
from dure.spec.names import unknown_name, unknown_setting
from dure.spec.rules import RULES

ENVIRONMENT_PREFIX = "DURE_"

INTERNAL_PREFIX = "DURE_INTERNAL_"
"""Variables that dure's own processes hand to each other; never settings, so never reported as unknown ones."""


@dataclass(frozen=True, kw_only=True)
class ResolvedSpec:
    """A spec, and for every setting where its value came from."""

    spec: RunSpec
    origin: dict[str, str]
    """Source of each field, and of each task option as `task_options.<name>`: `flag --epochs`, `default`, ..."""
    task_object: Mapping[str, Any] | None = None
    """Reason why class and options do not suffice to make the task again, and digests of its attributes; None if they
    do."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One place that settings come from."""

    values: Mapping[str, Any]
    say: Callable[[str], str]
    """Function that names the source of one setting, for people."""
    spell: Callable[[str], str] = str
    """Function that writes a setting's name as this source has it."""
    more: tuple[str, ...] = ()
    """Names other than settings that its faults may point to."""
    is_chosen: bool = True
    """False for defaults and the resumed run: what was not chosen now gives way instead of being a fault."""


@dataclass(kw_only=True)
class _Draft:
    """Settings on their way to a spec; faults are collected, not raised."""

    values: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    chosen: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

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
    strategies: Mapping[str, StrategyTraits],
    base: RunSpec | None = None,
    total_devices: int | None = None,
) -> ResolvedSpec:
    """Bring the settings of a run together: flags over `DURE_*` over TOML over the task's defaults.

    When a run is resumed its own spec takes the place of the task's defaults. Values may be text (flags and the
    environment have nothing else); a value of None counts as not given.

    Args:
        flags: Explicitly given settings by field name; `task_options` holds the task's own.
        environ: The process's environment.
        config: A TOML file whose keys are field names, with a `[task_options]` table.
        task_defaults: `Task.defaults` of the task's class.
        strategies: The known strategies by name.
        base: The spec of the run that is being resumed.
        total_devices: Devices of all hosts, where a launcher decides that and they are not `nproc` for each.

    Raises:
        SpecInvalid: One or more settings cannot be; every fault is in it.
    """
    draft = _Draft()
    settings = {name: value for name, value in flags.items() if value is not None}
    config_source = _config_source(config, draft.faults)
    environment_source = _environment_source(environ, draft.faults)
    if base is None:
        ground = _task_source(task_defaults, [settings, environment_source.values, config_source.values])
    else:
        # how much is said concerns this terminal, not the run; where processes are, and what is looked at, this start
        values = base.model_dump(
            exclude={"quiet", "preflight", "accept_changes", "trust_task", *NODE_FIELDS, *RECORD_FIELDS}
        )
        ground = _Source(values=values, say=lambda name: "the resumed run", is_chosen=False)
        config_source, environment_source = _without_place(config_source), _without_place(environment_source)
    for source in (ground, config_source, environment_source, _flag_source(settings)):
        _overlay(draft, source)
    if total_devices is not None:
        draft.values["total_devices"] = total_devices
    _settle_strategy(draft, strategies, base)
    spec = _validate(draft, strategies)
    if base is not None and spec is not None:
        draft.faults += _identity_faults(draft, spec, base)
    if draft.faults or spec is None:
        raise SpecInvalid(draft.faults)
    for name in RunSpec.model_fields:
        draft.origin.setdefault(name, "default")
    return ResolvedSpec(spec=spec, origin=draft.origin)


# --- the sources


def _flag_source(settings: Mapping[str, Any]) -> _Source:
    return _Source(values=settings, say=_say_flag, spell=flag_name, more=("resume",))


def _say_flag(name: str) -> str:
    if name == "task":
        return "argument task"
    option = name.removeprefix("task_options.")
    return f"flag {flag_name(name)}" if option == name else f"flag --task.{option}"


def _task_source(defaults: Mapping[str, Any], higher: list[Mapping[str, Any]]) -> _Source:
    task = next((str(values["task"]) for values in higher if "task" in values), "task")
    label = f"{task.rpartition(':')[2]}.defaults"
    return _Source(values=defaults, say=lambda name: label, is_chosen=False)


def _without_place(source: _Source) -> _Source:
    """Leave out where runs go: DURE_RUNS_DIR of a shell is about new runs, a resumed one stays where it is."""
    values = {name: value for name, value in source.values.items() if name not in PLACE_FIELDS}
    return _Source(values=values, say=source.say)


def _environment_source(environ: Mapping[str, str], faults: list[str]) -> _Source:
    """Read `DURE_<FIELD>`; an empty variable counts as not set, as in the shell."""
    known = {ENVIRONMENT_PREFIX + name.upper(): name for name in (*SETTINGS, *OTHER_NAMES)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(INTERNAL_PREFIX) or not text.strip():
            continue
        if variable not in known:
            faults.append(unknown_setting("environment variable", variable, SETTINGS, _variable))
        elif known[variable] == "task_options":
            values["task_options"] = _options_from_json(variable, text, faults)
        else:
            values[known[variable]] = text
    return _Source(values=values, say=lambda name: f"environment {_variable(name.split('.')[0])}", spell=_variable)


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _options_from_json(variable: str, text: str, faults: list[str]) -> dict[str, Any]:
    try:
        options = parse_json(text)
    except ValueError:
        options = None
    if isinstance(options, dict):
        return options
    faults.append(f'environment {variable} is {text!r} but must be a JSON object such as {{"hidden": 64}}')
    return {}


def _config_source(config: Path | None, faults: list[str]) -> _Source:
    if config is None:
        return _Source(values={}, say=str)
    values: dict[str, Any] = {}
    try:
        values = read_toml(config)
    except SpecInvalid as error:
        faults += error.faults
    return _Source(values=values, say=lambda name: str(config))


def read_toml(config: Path) -> dict[str, Any]:
    """Read a file of settings as it stands.

    Raises:
        SpecInvalid: It cannot be read, or is no TOML.
    """
    try:
        return documents.read_toml(Path(config))
    except DocumentInvalid as error:
        raise SpecInvalid([f"{config} {error}"]) from None
    except OSError as error:
        raise SpecInvalid([f"--config {config} cannot be read: {error.strerror}"]) from None


# --- bringing them together


def _overlay(draft: _Draft, source: _Source) -> None:
    """Lay one source over the ones below it."""
    try:
        values = with_own_names(source.values, source.spell)
    except SpecInvalid as error:
        draft.faults += error.faults
        return
    for name, value in values.items():
        if value is None:
            continue
        if name not in SETTINGS:
            fault = unknown_setting("setting", name, [*SETTINGS, *source.more], source.spell)
            draft.faults.append(f"{source.say(name)}: {fault}")
        elif name == "task_options":
            _overlay_options(draft, source, value)
        elif name == "task" and isinstance(value, Mapping):
            draft.faults.append(f"{source.say(name)}: task is a table: put the task's options under [task_options]")
        else:
            draft.values[name], draft.origin[name] = value, source.say(name)
            (draft.chosen.add if source.is_chosen else draft.chosen.discard)(name)
    _overlay_length(draft, source)


def _overlay_options(draft: _Draft, source: _Source, options: Any) -> None:
    if not isinstance(options, Mapping):
        draft.faults.append(f"{source.say('task_options')}: task_options is {options!r} but must be a table")
        return
    for name, value in options.items():
        key = f"task_options.{name}"
        draft.options[name], draft.origin[key] = value, source.say(key)
        (draft.chosen.add if source.is_chosen else draft.chosen.discard)(key)


def _overlay_length(draft: _Draft, source: _Source) -> None:
    given = [name for name in LENGTH_FIELDS if source.values.get(name) is not None]
    if len(given) == 2:
        draft.faults.append(f"{source.say('epochs')} and {source.say('samples')} both say how long to train: give one")
    elif given:
        draft.drop("samples" if given == ["epochs"] else "epochs")


def _settle_strategy(draft: _Draft, strategies: Mapping[str, StrategyTraits], base: RunSpec | None) -> None:
    """Choose the strategy when none is given, and let a resumed run's choices give way to new ones."""
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
        draft.drop("mesh")  # it was made for the ranks, or the axes, of another place
    if not any(name in draft.values for name in LENGTH_FIELDS):
        draft.values["epochs"] = 1.0


def _num_devices(draft: _Draft) -> int | None:
    """Return the devices of all hosts, as far as what was said of them is sound; None if it is not."""
    names = ("nproc", "nnodes", "total_devices")
    try:
        return RunSpec.model_validate(
            {"task": "-:-", **{name: draft.values[name] for name in names if name in draft.values}}
        ).num_devices
    except ValidationError:
        return None


# --- what cannot be


def _validate(draft: _Draft, strategies: Mapping[str, StrategyTraits]) -> RunSpec | None:
    """Check every setting by itself, then the sound ones together. Returns None when there is no task."""
    bad = {name for name, value in draft.values.items() if _is_bool_for_number(name, value)}
    try:
        RunSpec.model_validate({**draft.values, "task": draft.values.get("task", "-:-")})
    except ValidationError as error:
        bad |= {str(detail["loc"][0]) for detail in error.errors()}
    draft.faults += [_fault(draft, name) for name in draft.values if name in bad]
    strategy = draft.values["strategy"]
    if "strategy" not in bad and strategy not in strategies:
        bad.add("strategy")
        draft.faults.append(f"{draft.origin['strategy']}: {unknown_name('strategy', strategy, strategies)}")
    sound = {name: value for name, value in draft.values.items() if name not in bad}
    has_task = "task" in sound
    spec = RunSpec.model_validate({"task": "-:-", "task_options": draft.options, **sound})
    draft.faults += [f"{_say(draft, rule.blame)}: {rule.fault(spec)}" for rule in RULES if rule.breaks(spec, bad)]
    if "strategy" not in bad:
        draft.faults += _strategy_faults(draft, spec, strategies, bad)
    if not has_task and "task" not in bad:
        draft.faults.append("no task is given: name one, as in `dure train train.py:MyTask`")
    return spec if has_task else None


def _strategy_faults(
    draft: _Draft, spec: RunSpec, strategies: Mapping[str, StrategyTraits], bad: set[str]
) -> list[str]:
    """Compare the chosen strategy with what is asked of it."""
    traits, faults = strategies[spec.strategy], []
    if not bad & {"nproc", "nnodes"} and spec.num_devices > 1 and not traits.many_devices:
        many = next(name for name, row in strategies.items() if row.default_for == "many")
        cure = "--nproc 1" if spec.num_nodes == 1 else "--nnodes 1 and --nproc 1"
        faults.append(
            f"{_say(draft, 'strategy')}: strategy {spec.strategy} uses one device but {spec.counted_devices}:"
            f" choose {many}, or say {cure}"
        )
    if spec.mesh is not None and not bad & {"mesh", "nproc", "nnodes"}:
        try:
            parse_mesh(spec.mesh, traits.mesh_axes, spec.num_devices, spec.counted_devices)
        except ValueError as error:
            faults.append(f"{_say(draft, 'mesh')}: {error}")
    for setting in sorted({name for row in strategies.values() for name in row.settings}):
        value = getattr(spec, setting)
        is_default = value == RunSpec.model_fields[setting].get_default(call_default_factory=True)
        if is_default or setting in traits.settings or setting in bad:
            continue
        first, *others = (name for name, row in strategies.items() if setting in row.settings)
        able = f"{first} (or {', '.join(others)})" if others else first
        faults.append(
            f"{_say(draft, setting)}: {setting} is {value} but strategy {spec.strategy} cannot honour it:"
            f" choose --strategy {able}, or leave it out"
        )
    return faults


def _say(draft: _Draft, name: str) -> str:
    return f"{draft.origin.get(name, 'default')}"


def _is_bool_for_number(name: str, value: Any) -> bool:
    """Tell whether a truth value stands where a number belongs; Python would take True for 1."""
    return isinstance(value, bool) and bool not in kinds(RunSpec.model_fields[name])


def _fault(draft: _Draft, name: str) -> str:
    return f"{draft.origin[name]}: {name} is {_show(draft.values[name])} but must be {requirement(name)}"


def _show(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str | Path) else repr(value)


# --- resuming


def _identity_faults(draft: _Draft, spec: RunSpec, base: RunSpec) -> list[str]:
    """Refuse what would make the resumed run another run."""
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
    """Compare an option with the recorded one; a flag's text may stand for a number or a truth value."""
    if isinstance(value, str) and not isinstance(then, str):
        try:
            value = parse_json(value.lower())
        except ValueError:
            return False
    return bool(value == then)


def _identity_fault(origin: str, name: str, now: Any, then: Any) -> str:
    return (
        f"{origin}: {name} is {_show(now)} but the run was begun with {_show(then)}, and it is part of what the run is:"
        " leave it out, or start a new run"
    )
