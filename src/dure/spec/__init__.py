"""Settings of a run (`fields`), and their sources (`resolution`)."""

from dure.spec.fields import (
    EVALUATION_FIELDS,
    EXECUTION_FIELDS,
    GROUPS,
    IDENTITY_FIELDS,
    LENGTH_FIELDS,
    NODE_FIELDS,
    PLACE_FIELDS,
    RUN_NAME_PATTERN,
    RunSpec,
    flag_name,
    kinds,
    requirement,
    same_task,
)
from dure.spec.names import unknown_name, unknown_setting
from dure.spec.resolution import ENVIRONMENT_PREFIX, INTERNAL_PREFIX, ResolvedSpec, read_toml, resolve

__all__ = [
    "ENVIRONMENT_PREFIX",
    "EVALUATION_FIELDS",
    "EXECUTION_FIELDS",
    "GROUPS",
    "IDENTITY_FIELDS",
    "INTERNAL_PREFIX",
    "LENGTH_FIELDS",
    "NODE_FIELDS",
    "PLACE_FIELDS",
    "RUN_NAME_PATTERN",
    "ResolvedSpec",
    "RunSpec",
    "flag_name",
    "kinds",
    "read_toml",
    "requirement",
    "resolve",
    "same_task",
    "unknown_name",
    "unknown_setting",
]
