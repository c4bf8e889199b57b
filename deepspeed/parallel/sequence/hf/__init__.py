"""Sequence parallelism of Transformers models: attention, batches, loss (Ulysses)."""
