"""Lowest room: the accelerator, environment, logging, errors, random state, small arithmetic. No torch.distributed.

Everything above may use it. Start reading: `accelerator/abstract_accelerator.py`, `logging.py`.
"""
