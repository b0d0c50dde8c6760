"""Ranks that do not get on: notice, ask, explain."""
