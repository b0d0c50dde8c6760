"""Failures of ranks: errors, the lines of user code that caused them, and the first cause among several."""
