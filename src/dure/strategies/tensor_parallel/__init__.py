"""Layers that are divided over ranks and compute with their part."""
