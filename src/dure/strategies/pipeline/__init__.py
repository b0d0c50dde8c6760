"""Pipeline of stages."""
