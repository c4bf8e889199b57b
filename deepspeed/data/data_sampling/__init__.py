"""Which samples, in which order: measuring them, sampling by difficulty, batches by length."""
