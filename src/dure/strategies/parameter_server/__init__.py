"""Strategy with workers, which compute gradients, and servers, which keep the parameters."""
