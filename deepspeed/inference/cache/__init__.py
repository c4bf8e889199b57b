"""The paged cache of keys and values: who has which block, and the tensors."""
