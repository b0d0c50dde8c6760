"""Strategies whose ranks step independently and average from time to time."""
