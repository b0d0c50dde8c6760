"""Nodes of a run, and the connections between their launchers."""
