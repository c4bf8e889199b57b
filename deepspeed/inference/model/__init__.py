"""Running a causal model as it is on batches of sequences of any lengths, over a paged cache."""
