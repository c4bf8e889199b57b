"""The `sparse_attention` section: block-sparse attention patterns."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.section import Int, LenientConfigModel, key


class SparseAttentionConfig(LenientConfigModel):
    """Blocks of attention that are computed, in models whose attention is chosen by name; others read the section."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = key("fixed", "The pattern.")
    block: Int = key(16, "Number of rows and columns of a block.", ge=1)
    different_layout_per_head: bool = key(False, "Give every head its own pattern.")
    num_local_blocks: Int = key(4, "Blocks in a local window (fixed).", ge=0)
    num_global_blocks: Int = key(1, "Blocks that attend to everything (fixed, bigbird).", ge=0)
    attention: Literal["unidirectional", "bidirectional"] = key(
        "bidirectional", "Whether tokens attend to later ones."
    )
    horizontal_global_attention: bool = key(False, "Global blocks also attend to everything (bidirectional).")
    num_different_global_patterns: Int = key(
        1, "Different choices of global blocks over the heads (fixed).", ge=1
    )
    num_random_blocks: Int = key(0, "Random blocks per row (variable, bigbird).", ge=0)
    local_window_blocks: list[Int] = key([4], "Sizes of the local windows (variable).")
    global_block_indices: list[Int] = key([0], "First blocks of the global ranges (variable, bslongformer).")
    global_block_end_indices: list[Int] | None = key(
        None, "Ends of the global ranges (variable, bslongformer)."
    )
    num_sliding_window_blocks: Int = key(3, "Blocks in the sliding window (bigbird, bslongformer).", ge=0)
