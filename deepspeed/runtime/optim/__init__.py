"""Construction and classification of optimizers."""
