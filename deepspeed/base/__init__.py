"""The lowest layer: accelerator, environment, logging, errors, random state. No torch.distributed.

All other rooms may import it. Start reading: `accelerator/abstract_accelerator.py`, `logging.py`.
"""
