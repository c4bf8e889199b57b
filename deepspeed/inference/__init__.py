"""Inference: engines over unchanged models, a paged cache, continuous batching."""
