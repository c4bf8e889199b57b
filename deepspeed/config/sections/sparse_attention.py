"""The `sparse_attention` section: block-sparse attention patterns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deepspeed.config.section import Int, LenientConfigModel


class SparseAttentionConfig(LenientConfigModel):
    """Blocks of attention that are computed, in models whose attention is chosen by name; others read the section."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = Field(
        default="fixed", description="The pattern."
    )
    block: Int = Field(default=16, ge=1, description="Number of rows and columns of a block.")
    different_layout_per_head: bool = Field(default=False, description="Give every head its own pattern.")
    num_local_blocks: Int = Field(default=4, ge=0, description="Blocks in a local window (fixed).")
    num_global_blocks: Int = Field(
        default=1, ge=0, description="Blocks that attend to everything (fixed, bigbird)."
    )
    attention: Literal["unidirectional", "bidirectional"] = Field(
        default="bidirectional", description="Whether tokens attend to later ones."
    )
    horizontal_global_attention: bool = Field(
        default=False, description="Global blocks also attend to everything (bidirectional)."
    )
    num_different_global_patterns: Int = Field(
        default=1, ge=1, description="Different choices of global blocks over the heads (fixed)."
    )
    num_random_blocks: Int = Field(default=0, ge=0, description="Random blocks per row (variable, bigbird).")
    local_window_blocks: list[Int] = Field(default=[4], description="Sizes of the local windows (variable).")
    global_block_indices: list[Int] = Field(
        default=[0], description="First blocks of the global ranges (variable, bslongformer)."
    )
    global_block_end_indices: list[Int] | None = Field(
        default=None, description="Ends of the global ranges (variable, bslongformer)."
    )
    num_sliding_window_blocks: Int = Field(
        default=3, ge=0, description="Blocks in the sliding window (bigbird, bslongformer)."
    )
