"""Errors of ranks, and the lines of the user's code that they come from."""
