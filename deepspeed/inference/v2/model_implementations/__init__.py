"""Weights of a model as the parts of ``deepspeed.inference.v2.modules`` take them: a rank's shard of each, put together
from the tensors of a checkpoint. The engine runs unchanged models and needs none of it."""
