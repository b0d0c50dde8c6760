"""Training strategies, one contract for all."""
