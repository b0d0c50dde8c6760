"""One training's objects on a rank: model, data, order of samples, evaluation."""
