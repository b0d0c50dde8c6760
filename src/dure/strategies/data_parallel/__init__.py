"""Strategies in which every rank or device has the whole model."""
