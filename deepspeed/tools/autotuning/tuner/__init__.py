"""Search strategies over a space of experiments."""
