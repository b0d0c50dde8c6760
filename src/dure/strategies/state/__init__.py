"""State of models, optimisers and objects, as strategies divide and carry it."""
