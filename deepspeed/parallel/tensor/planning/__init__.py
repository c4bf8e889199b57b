"""The plan of a tensor-parallel model: what becomes of each weight, found by following one small run on the meta
device."""
