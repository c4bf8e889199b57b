"""Domino: tensor-parallel transformers that overlap the all-reduce of one half of a batch with computing the other."""
