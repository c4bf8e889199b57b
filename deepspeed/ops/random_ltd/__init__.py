"""Sampling, gathering and scattering the tokens of a sequence (random-LTD)."""
