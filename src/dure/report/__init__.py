"""Reports on a run for users, from its records."""
