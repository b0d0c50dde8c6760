"""Failures of ranks: errors, the lines of the user's code that they come from, and the first cause among several."""
