"""State of a run over time: what is saved when, and whether replicas agree."""
