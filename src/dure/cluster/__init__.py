"""Ranks and hosts as described by the launchers of clusters."""
