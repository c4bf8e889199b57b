"""The `elasticity` section: one batch size for many numbers of ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from deepspeed.config.sections import Float, Int, LenientConfigModel, deprecated


class ElasticityConfig(LenientConfigModel):
    """Bounds between which batch size and number of ranks are chosen."""

    enabled: bool = Field(default=False, description="Turn it on.")
    max_train_batch_size: Int = Field(
        default=2000, ge=1, description="Largest global batch; must be written when enabled."
    )
    micro_batch_sizes: list[Annotated[Int, Field(ge=1)]] = Field(
        default=[2, 4, 6], description="Micro-batch sizes to choose from; must be written when enabled."
    )
    min_gpus: Int = Field(default=1, ge=1, description="Fewest ranks.")
    max_gpus: Int = Field(default=10000, ge=1, description="Most ranks.")
    min_time: Int = Field(
        default=0, ge=0, description="Minimum number of minutes between two changes (version 0.1)."
    )
    prefer_larger_batch: bool = Field(default=True, description="Of several choices take the largest batch.")
    prefer_large_batch: bool = deprecated(
        True, "Other spelling of `prefer_larger_batch`.", new_param="prefer_larger_batch"
    )
    ignore_non_elastic_batch_info: bool = Field(
        default=False, description="Ignore batch keys given next to this section instead of refusing them."
    )
    version: Float = Field(default=0.2, description="Version of the algorithm.")
    num_gpus_per_node: Int = Field(default=1, ge=1, description="Devices per node (version 0.2).")
    model_parallel_size: Int = Field(
        default=1, ge=1, description="Ranks that share one copy of the model (version 0.2)."
    )
