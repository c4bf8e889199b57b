"""Choice of the requests and tokens of each forward: pure, without a model."""
