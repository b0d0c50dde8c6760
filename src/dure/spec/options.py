"""Options of a strategy: a small model in the strategy's own folder, and nowhere else."""

from typing import Self

from pydantic import BaseModel, ConfigDict

from dure.spec.fields import RunSpec


class StrategyOptions(BaseModel):
    """Options of one strategy. A field's description is its help text; its name follows the strategy's.

    `units` of fsdp is the flag `--fsdp.units`, the key `units` in a file's table `[fsdp]`, the variable
    `DURE_FSDP__UNITS`, and `fsdp={"units": ...}` in Python. Its module must not import torch: `--help` reads it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    @classmethod
    def of(cls, spec: RunSpec) -> Self:
        """Return the options in a run's spec."""
        return cls.model_validate(spec.options)

    def faults(self, spec: RunSpec) -> list[tuple[str, str]]:
        """Return conflicts of these options with each other and with the run's settings, all individually valid.

        Args:
            spec: Spec of the run, with individually valid settings.

        Returns:
            The setting or option at fault, and a sentence about it that begins with a name.
        """
        return []
