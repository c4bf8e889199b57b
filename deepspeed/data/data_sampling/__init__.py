"""Selection and order of samples: measuring them, sampling by difficulty, batches by length."""
