"""Settings of a run (`fields`), and their sources (`resolution`)."""

from dure.spec.fields import (
    EVALUATION_FIELDS,
    GROUPS,
    IDENTITY_FIELDS,
    LENGTH_FIELDS,
    NODE_FIELDS,
    OTHER_NAMES,
    PLACE_FIELDS,
    RUN_NAME_PATTERN,
    SETTINGS,
    TABLES,
    RunSpec,
    field_of,
    flag_name,
    is_everyday,
    kinds,
    read_record,
    requirement,
    requirement_of,
    same_task,
    with_own_names,
)
from dure.spec.names import unknown_name, unknown_setting
from dure.spec.options import StrategyOptions
from dure.spec.resolution import ResolvedSpec, resolve
from dure.spec.sources import ENVIRONMENT_PREFIX, INTERNAL_PREFIX, read_toml
from dure.spec.strategy_traits import StrategyTable, option_names

__all__ = [
    "ENVIRONMENT_PREFIX",
    "EVALUATION_FIELDS",
    "GROUPS",
    "IDENTITY_FIELDS",
    "INTERNAL_PREFIX",
    "LENGTH_FIELDS",
    "NODE_FIELDS",
    "OTHER_NAMES",
    "PLACE_FIELDS",
    "RUN_NAME_PATTERN",
    "SETTINGS",
    "TABLES",
    "ResolvedSpec",
    "RunSpec",
    "StrategyOptions",
    "StrategyTable",
    "field_of",
    "flag_name",
    "is_everyday",
    "kinds",
    "option_names",
    "read_record",
    "read_toml",
    "requirement",
    "requirement_of",
    "resolve",
    "same_task",
    "unknown_name",
    "unknown_setting",
    "with_own_names",
]
