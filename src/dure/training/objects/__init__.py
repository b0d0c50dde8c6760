"""State in Python objects of a task that restarts and resumes restore."""
