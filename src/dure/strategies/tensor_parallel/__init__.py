"""Strategy with layers that are divided over ranks, each of which computes its part."""
