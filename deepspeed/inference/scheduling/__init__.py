"""Which tokens of which requests a forward computes: pure, without a model."""
