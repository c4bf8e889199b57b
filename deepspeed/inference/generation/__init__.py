"""Generation: continuous batching, sampling, and the loops around them."""
