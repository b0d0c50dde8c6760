"""Collectives matched by name: a thread per process executes them in the order that rank 0 announces."""
