"""State of models, optimisers and objects: sharded, saved, and restored after trials."""
