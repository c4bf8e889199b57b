"""Sources of the weights of a FastGen engine."""
