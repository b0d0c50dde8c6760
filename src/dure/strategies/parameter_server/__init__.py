"""Workers that compute gradients, and servers that keep parameters."""
