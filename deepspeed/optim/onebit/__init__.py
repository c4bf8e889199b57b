"""Optimizers that compress communication to signs."""

from deepspeed.optim.onebit.adam import OnebitAdam
from deepspeed.optim.onebit.lamb import OnebitLamb
from deepspeed.optim.onebit.zoadam import ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]
