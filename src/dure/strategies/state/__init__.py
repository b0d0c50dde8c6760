"""State of models, optimisers and objects, as strategies divide, carry and try it."""
