"""Division of batches and optimisers: whether it is exact, and how it is done."""
