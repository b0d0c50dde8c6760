"""Real and synthetic data sets, and randomness that belongs to a sample."""
