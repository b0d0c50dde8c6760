"""Models that are cut into sections, for the strategies that run sections on different devices or ranks."""
