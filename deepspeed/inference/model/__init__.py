"""Run an unchanged causal model on batches of sequences of any lengths, over a paged cache."""
