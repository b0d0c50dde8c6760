"""Trials of a task's loss, to find anything that depends on how batches are divided."""
