"""Strategies that divide parameters over ranks and gather them for computation."""
