"""Models that are cut into sections, and the strategies that run them one after another."""
