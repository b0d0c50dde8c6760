"""Division of batches and optimisers: how it is done, and checks that it is exact."""
