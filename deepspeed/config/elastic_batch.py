"""Batch arithmetic of elastic training: one global batch size that many world sizes can train with.

A batch of B samples, split into micro-batches of m, can be trained by every number of ranks that divides B / m. The
batch is chosen to maximize how many do: a multiple of the micro-batch sizes by a *highly composite number*, one with
more divisors than any smaller number (Ramanujan 1915; OEIS A002182). Version 0.1 allows exactly those numbers of ranks.
Version 0.2 counts in whole nodes, supports ranks that share a copy of the model, and also accepts any other number of
ranks, with the largest batch that fits.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version
from pydantic import ValidationError

from deepspeed.base.logging import logger
from deepspeed.config.axes import divisors
from deepspeed.config.sections.elasticity import (
    ELASTICITY,
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)

SCHEDULER_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
MIN_VERSION = "0.3.8"
HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


@dataclass(frozen=True)
class ElasticBatch:
    """``train``: samples per step. ``ranks``: numbers of data-parallel ranks that can train it. ``micro``: micro-batch
    size for the current number of ranks, None if that was not given."""

    train: int
    ranks: list[int]
    micro: int | None = None


def get_candidate_batch_sizes(base_list: Iterable[int], max_acceptable_batch_size: int) -> list[int]:
    """Return for each base its largest multiple by a highly composite number, up to the maximum (a larger base is kept
    as it is); each candidate once, in no particular order."""
    candidates = set()
    for base in base_list:
        factors = [factor for factor in HIGHLY_COMPOSITE if base * factor <= max_acceptable_batch_size]
        candidates.add(base * max(factors, default=1))
    return list(candidates)


def get_valid_gpus(
    batch_size: int, micro_batches: Iterable[int], min_valid_gpus: int, max_valid_gpus: int
) -> list[int]:
    """Return the numbers of ranks within the bounds that can train ``batch_size`` with one of the micro-batch sizes,
    ascending."""
    found = set()
    for micro in micro_batches:
        if batch_size % micro == 0:
            found.update(divisors(batch_size // micro))
    return sorted(count for count in found if min_valid_gpus <= count <= max_valid_gpus)


def get_best_candidates(
    candidate_batch_sizes: Iterable[int],
    micro_batches: Sequence[int],
    min_gpus: int,
    max_gpus: int,
    prefer_larger: bool,
) -> tuple[int, list[int]]:
    """Return the candidate that the most rank counts can train, and these counts. Ties: the largest or smallest
    candidate. The list is empty if no candidate has any."""
    best = min(micro_batches), list[int]()
    for size in sorted(candidate_batch_sizes, reverse=prefer_larger):
        valid = get_valid_gpus(size, micro_batches, min_gpus, max_gpus)
        if len(valid) > len(best[1]):
            best = size, valid
    return best


def _widest_batch(
    section: ElasticityConfig, limit: int, min_gpus: int, max_gpus: int, per: str = ""
) -> tuple[int, list[int]]:
    """Version 0.1: return the batch up to ``limit`` that the most rank counts can train. A bound of 0 is open.
    ``per``: unit of the limit in the error message, if bounds are numbers of nodes."""
    micro = section.micro_batch_sizes
    min_gpus, max_gpus = min_gpus or 1, max_gpus or limit // min(micro)
    bases = [base for base in (*micro, math.lcm(*micro)) if base <= limit]
    candidates = get_candidate_batch_sizes(bases, limit)
    best = get_best_candidates(candidates, micro, min_gpus, max_gpus, section.prefer_larger_batch)
    if not best[1]:
        raise ElasticityConfigError(
            f"no batch of up to {limit} samples{per}, in micro-batches of {micro}, fits {min_gpus} to {max_gpus} "
            f"{'nodes' if per else 'ranks'}: raise elasticity.max_train_batch_size, or change min_gpus or max_gpus"
        )
    return best


def _in_whole_nodes(section: ElasticityConfig, data_parallel: float | None) -> tuple[int, list[int]]:
    """Version 0.2: return the batch that the most node counts can train; if the current number of data-parallel ranks
    is not among them, the largest (or, if the section prefers it, smallest) batch that fits it."""
    devices = section.num_gpus_per_node
    copies = devices // section.model_parallel_size
    train, nodes = _widest_batch(
        section,
        section.max_train_batch_size // copies,
        section.min_gpus // devices,
        section.max_gpus // devices,
        f" for each of the {copies} copies of the model in a node",
    )
    train, ranks = train * copies, [count * copies for count in nodes]
    if data_parallel is None or data_parallel in ranks:
        return train, ranks
    present = int(data_parallel)
    sizes = [
        section.max_train_batch_size // (micro * present) * micro * present
        for micro in section.micro_batch_sizes
    ]
    fitting = [size for size in sizes if size > 0]
    if not fitting:
        raise ElasticityIncompatibleWorldSize(
            f"{present} data-parallel ranks with micro-batches of at least {min(section.micro_batch_sizes)} exceed "
            f"elasticity.max_train_batch_size ({section.max_train_batch_size})"
        )
    return (max if section.prefer_larger_batch else min)(fitting), [present]


def elastic_batch(section: ElasticityConfig, data_parallel: int | None) -> ElasticBatch:
    """Return the batch of an enabled, valid section for this number of data-parallel ranks.

    Raises:
        ElasticityIncompatibleWorldSize: the section does not allow that number.
        ElasticityConfigError: no batch fits the section's bounds.
    """
    if section.version == 0.1:
        train, ranks = _widest_batch(
            section, section.max_train_batch_size, section.min_gpus, section.max_gpus
        )
    else:
        train, ranks = _in_whole_nodes(section, data_parallel)
    if data_parallel is None:
        return ElasticBatch(train, ranks)
    if data_parallel not in ranks:
        raise ElasticityIncompatibleWorldSize(
            f"{data_parallel} data-parallel ranks cannot share the elastic batch of {train} samples; rank "
            f"counts that can: {', '.join(map(str, ranks))}"
        )
    share = train // data_parallel
    micro = max(size for size in section.micro_batch_sizes if share % size == 0)
    return ElasticBatch(train, ranks, micro)


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the config (a dict) has an enabled `elasticity` section."""
    return bool(ds_config.get(ELASTICITY, {}).get("enabled", False))


def _section_of(values: Mapping[str, Any]) -> ElasticityConfig:
    """Return the section, its values validated alone and together. Raises ElasticityConfigError."""
    try:
        section = ElasticityConfig(**values)
    except ValidationError as error:
        wrong = "; ".join(
            f"{ELASTICITY}.{'.'.join(map(str, entry['loc']))} is {entry['input']!r}: {entry['msg']}"
            for entry in error.errors()
        )
        raise ElasticityConfigError(wrong) from None
    problems = [f"{ELASTICITY}.{key} {text}" for key, text in section.problems()]
    if problems:
        raise ElasticityConfigError("; ".join(problems))
    return section


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compare the section with the one that the cluster scheduler has read.

    A scheduler that changes the number of ranks passes the section it uses in the environment variable
    DEEPSPEED_ELASTICITY_CONFIG (JSON); without the variable nothing is compared.

    Raises:
        ElasticityConfigError: largest batch, micro-batch sizes or version differ, or the variable is not a JSON object.
    """
    text = os.environ.get(SCHEDULER_CONFIG)
    if text is None:
        logger.debug(
            "%s is not set: the config is not compared with the scheduler's elastic section", SCHEDULER_CONFIG
        )
        return
    try:
        theirs = ElasticityConfig(**json.loads(text))
    except (ValueError, TypeError) as error:  # a ValidationError is a ValueError
        raise ElasticityConfigError(
            f"{SCHEDULER_CONFIG} does not hold the section as JSON: {error}"
        ) from None
    ours = _section_of(runtime_elastic_config_dict)
    for name in ("max_train_batch_size", "micro_batch_sizes", "version"):
        if getattr(ours, name) != getattr(theirs, name):
            raise ElasticityConfigError(
                f"{ELASTICITY}.{name} is {getattr(ours, name)}, but the scheduler uses "
                f"{getattr(theirs, name)} ({SCHEDULER_CONFIG}); they must agree"
            )


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Return the global batch size of an elastic config, and the numbers of ranks that can train with it.

    For the cluster scheduler, which decides how many ranks a job gets, and for the job itself: the same config gives
    the same answer everywhere. Version 0.2 answers for one number of ranks: ``world_size``, else the environment
    variable WORLD_SIZE.

    Args:
        ds_config: the config as a dict.
        target_deepspeed_version: release that the job will run with.
        world_size: number of ranks; with a version 0.2 section all of them, including those that share a model.
        return_microbatch: return the micro-batch size even without ``world_size``; WORLD_SIZE must then be set.

    Returns:
        (batch size, data-parallel ranks in ascending order), and the largest micro-batch size that fits if the number
        of ranks is given.

    Raises:
        ValueError: ``ds_config`` is not a dict.
        ElasticityError: the config has no enabled `elasticity` section, or the release is too old.
        ElasticityConfigError: the section is invalid, or the number of ranks is needed and unknown.
        ElasticityIncompatibleWorldSize: the section does not allow ``world_size``, or it is not a multiple of
            ``model_parallel_size``.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"ds_config must be a dict, not {type(ds_config).__name__}")
    if ELASTICITY not in ds_config:
        raise ElasticityError(f"the config has no section '{ELASTICITY}': elastic training needs one")
    if not elasticity_enabled(ds_config):
        raise ElasticityError(f"{ELASTICITY}.enabled is false: set it to true for elastic training")
    section = _section_of(ds_config[ELASTICITY])
    if Version(str(target_deepspeed_version)) < Version(MIN_VERSION):
        raise ElasticityError(
            f"release {target_deepspeed_version} has no elastic training: it came with {MIN_VERSION}"
        )
    wants_micro = world_size > 0 or return_microbatch
    if world_size <= 0 and (section.version == 0.2 or return_microbatch):
        world_size = _world_size_of_environment()
    if world_size > 0 and world_size % section.model_parallel_size:
        raise ElasticityIncompatibleWorldSize(
            f"{world_size} ranks are not a multiple of {ELASTICITY}.model_parallel_size "
            f"({section.model_parallel_size}), the ranks that share one copy of the model"
        )
    data_parallel = world_size // section.model_parallel_size if world_size > 0 else None
    batch = elastic_batch(section, data_parallel)
    if wants_micro:
        assert batch.micro is not None
        return batch.train, batch.ranks, batch.micro
    return batch.train, batch.ranks


def _world_size_of_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdigit() or int(text) < 1:
        raise ElasticityConfigError(
            "elasticity version 0.2 needs the number of ranks: pass world_size, or set WORLD_SIZE"
        )
    return int(text)
