"""Domino: transformers with tensor parallelism that sum one half of a batch while they compute the other."""
