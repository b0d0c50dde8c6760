"""Pipeline of stages on several ranks."""
