"""Checks, before a run, whether the machines can do it: what is missing is named together with its cure."""
