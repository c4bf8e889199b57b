"""Passes over a model's graph and its inputs before it is compiled."""
