"""Orders to the ranks of a round, derived from how the ranks of earlier rounds ended."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOrders:
    """Orders to the ranks of one round."""

    microbatch_size: int | None = None
    """Maximum samples per backward on one device, after ranks ran out of memory with more; None for the spec's."""
    trusted_samples: int | None = None
    """Samples seen up to which the run is known to be correct, and from which it continues; None to trust all of it."""
    stopped_by: int | None = None
    """Stop signal that ended a round, after which the ranks only save the snapshots in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Restart that was decided."""

    number: int
    """Number of this restart among those that count, from 1."""
    rank: int
    """Rank whose failure was the first cause."""
    step: int
    """Step of that rank when it failed; -1 before the first."""
    cause: str
    """Cause in one line."""
    microbatch_sizes: tuple[int, int] | None = None
    """Microbatch sizes before and after, if memory ran out. Such a restart does not count."""
    go_back_to: int | None = None
    """Position in samples to which the run goes back, because it can be trusted up to there; None otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """Plan of a round: the orders to its ranks, and the reason for the round."""

    orders: RoundOrders = field(default_factory=RoundOrders)
    restart: Restart | None = None
    """Restart from which the round results; None if there is none."""
    change: str | None = None
    """Reason why the round before was ended, if it was not a rank's failure."""

    def after_round(self, *, has_begun: bool) -> "RoundPlan":
        """Return the part that also applies to later rounds.

        Args:
            has_begun: Whether a rank had begun a step in this one: then all have discarded untrusted state.
        """
        trusted = None if has_begun else self.orders.trusted_samples
        return RoundPlan(orders=replace(self.orders, stopped_by=None, trusted_samples=trusted))

    def after_restart(self, restart: Restart) -> "RoundPlan":
        """Return the plan for the round after a restart."""
        orders = self.orders
        if restart.microbatch_sizes is not None:
            orders = replace(orders, microbatch_size=restart.microbatch_sizes[1])
        if restart.go_back_to is not None:
            orders = replace(orders, trusted_samples=restart.go_back_to)
        return RoundPlan(orders=orders, restart=restart)

    def after_change(self, why: str | None) -> "RoundPlan":
        """Return the plan for the round that begins because the set of nodes has changed."""
        return RoundPlan(orders=self.orders, change=why)

    def stopped_by(self, number: int) -> "RoundPlan":
        """Return the plan with the order to save only the snapshots in memory, because of a stop signal."""
        return replace(self, orders=replace(self.orders, stopped_by=number))
