"""Diagnosis of a run from its files: evidence, cause, remedy."""
