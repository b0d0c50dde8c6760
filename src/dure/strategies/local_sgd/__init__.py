"""Ranks that step by themselves and average now and then."""
