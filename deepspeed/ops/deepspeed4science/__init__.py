"""Operations for scientific models."""

from deepspeed.ops.deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention, EvoformerFusedAttention

__all__ = ["DS4Sci_EvoformerAttention", "EvoformerFusedAttention"]
