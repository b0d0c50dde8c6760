"""Trials of a task's loss that find what would depend on the division of its batches."""
