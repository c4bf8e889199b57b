"""Where the weights of a FastGen engine come from."""
