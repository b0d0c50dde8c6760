"""Measurement of steps: clocks, and scripts from outside."""
