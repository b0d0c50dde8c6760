"""Execution of scripts in the ranks of `dure run`."""
