"""The `elasticity` section: one batch size for many world sizes, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from deepspeed.base.exceptions import ExplainedError
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.section import Float, Int, LenientSwitched, deprecated, key

VERSIONS = (0.1, 0.2)

ELASTICITY = "elasticity"
"""The section's name."""


class ElasticityError(ExplainedError):
    """Elastic training was requested, but is not possible."""


class ElasticityConfigError(ElasticityError, DeepSpeedConfigError):
    """The section is invalid, or contradicts another part of the config."""


class ElasticityIncompatibleWorldSize(ElasticityError, DeepSpeedConfigError):
    """The section does not allow this number of ranks."""


class ElasticityConfig(LenientSwitched):
    """Bounds between which batch size and number of ranks are chosen."""

    max_train_batch_size: Int = key(2000, "Largest global batch; required when enabled.", ge=1)
    micro_batch_sizes: list[Annotated[Int, Field(ge=1)]] = key(
        [2, 4, 6], "Micro-batch sizes to choose from; required when enabled.", min_length=1
    )
    min_gpus: Int = key(1, "Fewest ranks.", ge=1)
    max_gpus: Int = key(10000, "Most ranks.", ge=1)
    min_time: Int = key(0, "Minimum minutes between changes (version 0.1).", ge=0)
    prefer_larger_batch: bool = key(True, "Prefer the largest batch among several choices.")
    prefer_large_batch: bool = deprecated(
        True, "Alternative spelling of `prefer_larger_batch`.", new_param="prefer_larger_batch"
    )
    ignore_non_elastic_batch_info: bool = key(
        False, "Ignore batch keys given next to this section instead of refusing them."
    )
    version: Float = key(0.2, "Version of the algorithm, 0.1 or 0.2.")
    num_gpus_per_node: Int = key(1, "Devices per node (version 0.2).", ge=1)
    model_parallel_size: Int = key(1, "Ranks that share one copy of the model (version 0.2).", ge=1)
    replicate_state: bool = key(
        False,
        "After each step, keep every rank's state in memory that outlives the rank, here and on another "
        "machine, for `deepspeed --elastic_training`.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, mistake) of an enabled section."""
        for name in ("max_train_batch_size", "micro_batch_sizes"):
            if name not in self.model_fields_set:
                yield name, "is missing: elasticity needs it"
        if self.max_gpus < self.min_gpus:
            yield "max_gpus", f"{self.max_gpus} is below min_gpus ({self.min_gpus})"
        too_large = [size for size in self.micro_batch_sizes if size > self.max_train_batch_size]
        if too_large:
            yield (
                "micro_batch_sizes",
                f"{too_large[0]} is above max_train_batch_size ({self.max_train_batch_size})",
            )
        if self.version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            yield "version", f"{self.version} is unknown: supported are {known}"
        elif self.version == 0.1 and self.model_parallel_size > 1:
            yield (
                "model_parallel_size",
                f"{self.model_parallel_size} needs version 0.2: version 0.1 counts whole models",
            )
        elif self.num_gpus_per_node % self.model_parallel_size:
            yield (
                "num_gpus_per_node",
                f"{self.num_gpus_per_node} is not a multiple of model_parallel_size "
                f"({self.model_parallel_size}): a copy of the model must fit in a node",
            )
