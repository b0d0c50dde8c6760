"""Rounds of ranks: start, watch, end and restart, on one host or several."""
