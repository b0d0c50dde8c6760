"""Whether and how a batch or an optimiser can be divided."""
