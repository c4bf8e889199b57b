"""Tiled compute along the sequence: intermediate activations exist for one tile at a time."""
