"""Gradients: from autograd to their sum over ranks.

`reducer.py` takes what autograd leaves and decides when a bucket is summed, `bucket.py` holds the sum of this rank, and
a `GradientSum` (`sums.py`, `quantized_sum.py`) is the collective.
"""
