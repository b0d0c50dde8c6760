"""Proof that a script computes on several ranks what it computes on one."""
