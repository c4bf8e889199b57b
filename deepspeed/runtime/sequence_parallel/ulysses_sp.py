"""The documented module of sequence parallelism for Transformers models: its names come from the files beside it."""

from deepspeed.runtime.sequence_parallel.attention import UlyssesSPAttentionHF
from deepspeed.runtime.sequence_parallel.dataloader import UlyssesSPDataLoaderAdapter

__all__ = [
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
]
