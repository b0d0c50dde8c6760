"""Shared-memory segments of the ranks of one host."""
