"""Objects of one training run on a rank: model, data, sample order, evaluation."""
