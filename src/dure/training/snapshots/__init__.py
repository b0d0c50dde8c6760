"""Snapshots in memory."""
