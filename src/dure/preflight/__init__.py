"""Checks, before a run, whether the machines can do it: each fault is reported with its cure."""
