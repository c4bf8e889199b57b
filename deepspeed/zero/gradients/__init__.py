"""Gradients: from autograd to their sum over ranks."""
