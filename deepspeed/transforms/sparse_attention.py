"""The section ``sparse_attention`` for an unmodified model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.base.transformers_models import text_config
from deepspeed.config.getters import get_sparse_attention

if TYPE_CHECKING:
    from deepspeed.ops.sparse_attention import SparsityConfig
    from deepspeed.transforms.module_transforms import TransformContext

# Classes of deepspeed.ops.sparse_attention, which is imported only where a config has the section.
_PATTERNS = {
    "dense": "DenseSparsityConfig",
    "fixed": "FixedSparsityConfig",
    "variable": "VariableSparsityConfig",
    "bigbird": "BigBirdSparsityConfig",
    "bslongformer": "BSLongformerSparsityConfig",
}
_SEED = 1234


@dataclass(frozen=True)
class SparseAttention:
    """Sets block-sparse attention on Transformers models, whose attention is selected by name. Models that already have
    sparse attention, and other models, are left unchanged: they read the section themselves."""

    section: dict[str, Any]
    name, after, before = "sparse_attention", (), ()

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        """Set the attention. ValueError: combined with sequence parallelism, or with tensor parallelism and a layout
        per head; a contradictory section; or a head count that differs from the model's."""
        from deepspeed.ops.sparse_attention import SparseSelfAttention
        from deepspeed.ops.sparse_attention.transformers_attention import (
            takes_attention,
            use_sparse_attention,
        )

        if any(isinstance(each, SparseSelfAttention) for each in module.modules()):
            context.report("the model has its own")
            return
        if not takes_attention(module):
            context.report("for the model to read: its attention is unchanged")
            return
        if (ranks := context.mesh.size("sp")) > 1:
            raise ValueError(f"sparse_attention with sequence_parallel_size={ranks}: remove one of them")
        if (ranks := context.mesh.size("tp")) > 1 and self.section.get("different_layout_per_head"):
            raise ValueError(
                f"sparse_attention.different_layout_per_head with tensor_parallel.autotp_size={ranks}: the "
                "heads are split over ranks and need the same layout: set different_layout_per_head to false"
            )
        wanted = self.sparsity(int(text_config(module.config).num_attention_heads))
        use_sparse_attention(module, wanted)
        context.report(
            f"{self.section['mode']} pattern in blocks of {wanted.block}, without dropout of attention weights"
        )

    def sparsity(self, heads: int) -> SparsityConfig:
        """Build the section's sparsity pattern. Random blocks are the same on all ranks and in every run."""
        from deepspeed.ops import sparse_attention as patterns

        given = get_sparse_attention({"sparse_attention": self.section})
        assert given is not None
        made = getattr(patterns, _PATTERNS[given.pop("mode")])(heads, **given)
        made.random = random.Random(_SEED)
        return made
