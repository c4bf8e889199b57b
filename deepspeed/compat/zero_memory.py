"""Memory of the model states of ZeRO stages 2 and 3: the documented estimators and their tables.

They count model states only (weights, gradients, masters, moments; Rajbhandari et al. 2020, section 3.1): mixed
precision with Adam, that is 2 bytes per parameter for the 16-bit weights, 2 for their gradients, and 16 for fp32
masters, gradients and two moments at the update. Activations, buffers and fragmentation are extra. With
``offload`` states are in host memory, with ``additional_buffer_factor`` as a margin.

The numbers are those of release 0.19.8, for comparison. This package needs less, depending on the model's shape:
functions that take a model also print the planner's numbers (``deepspeed/planning``) to standard error. Nothing is
allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from deepspeed.base.sharded import full_numel
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.request import PlanRequest, answer

_WEIGHT = 2
_GRADIENT = 2
_OPTIMIZER = 16
_FP32 = 4
_GB = 2**30
_STAGE_3_ROWS = ((True, True), (True, False), (False, False))
"""Rows: (offload the optimizer, offload parameters)."""


def model_sizes(model: nn.Module) -> tuple[int, int]:
    """Return ``(parameters in total, of the largest layer)``; a layer is a module's direct parameters, and a
    parameter shared by several modules counts once in the total."""
    total = sum(full_numel(p) for p in model.parameters())
    largest = max(
        (sum(full_numel(p) for p in module.parameters(recurse=False)) for module in model.modules()),
        default=0,
    )
    return total, largest


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return bytes ``(host per node, each GPU)`` at stage 2.

    The host holds at least one fp32 copy of the model per process while it is built.
    """
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        gpu = _WEIGHT * total_params
        host = total_params * max(_FP32 * ranks, _OPTIMIZER)
    else:
        gpu = _WEIGHT * total_params + (_GRADIENT + _OPTIMIZER) * total_params / ranks
        host = total_params * _FP32 * num_gpus_per_node
    return int(host * additional_buffer_factor), int(gpu)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return bytes ``(host per node, each GPU, of which for the gathered largest layer)`` at stage 3.

    ``zero_init``: the model is built under ``zero.Init`` and never exists whole; otherwise every process of a node
    builds an fp32 copy of it first. ``cpu_offload_params`` counts only together with ``cpu_offload``.
    """
    ranks = num_gpus_per_node * num_nodes
    layer = (_WEIGHT + _GRADIENT) * largest_layer_params
    sharded, offloaded = _WEIGHT + _OPTIMIZER, 0
    if cpu_offload and cpu_offload_params:
        sharded, offloaded = 0, sharded
    elif cpu_offload:
        sharded, offloaded = _WEIGHT, _OPTIMIZER
    gpu = layer + sharded * total_params / ranks
    host = offloaded * total_params / num_nodes
    if not zero_init:
        host = max(host, _FP32 * total_params * num_gpus_per_node)
    elif not cpu_offload:
        host = _FP32 * largest_layer_params * num_gpus_per_node
    return int(host * additional_buffer_factor), int(gpu), layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the stage-2 table for ``model``, which may be on the meta device, and this package's plan for it."""
    total, _ = model_sizes(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
    rows = [
        (f"offload_optimizer={_device(offload)}", _section(2, offload), False) for offload in (True, False)
    ]
    _print_planned(model, num_gpus_per_node, num_nodes, rows)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the stage-2 table for a number of parameters, one row per offload option."""
    rows = []
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((host, gpu, f"offload_optimizer={_device(offload)}"))
    model = f"Model with {_millions(total_params)} total params."
    _print_table(model, num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the stage-3 table for ``model``, which may be partitioned or on the meta device, and this package's plan
    for it."""
    total, largest = model_sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
    rows = [
        (_stage_3_options(optimizer, params, zero_init), _section(3, optimizer, params), zero_init)
        for optimizer, params in _STAGE_3_ROWS
        for zero_init in (True, False)
    ]
    _print_planned(model, num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the stage-3 table for numbers of parameters, one row per offload and ``zero_init`` option."""
    rows = []
    for optimizer, params in _STAGE_3_ROWS:
        for zero_init in (True, False):
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            rows.append((host, gpu, _stage_3_options(optimizer, params, zero_init)))
    layers = f"{_millions(largest_layer_params)} largest layer params"
    model = f"Model with {_millions(total_params)} total params, {layers}."
    _print_table(model, num_gpus_per_node, num_nodes, rows)


def _stage_3_options(optimizer: bool, params: bool, zero_init: bool) -> str:
    return (
        f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}, zero_init={int(zero_init)}"
    )


def _section(stage: int, optimizer: bool, params: bool = False) -> dict[str, Any]:
    """Return the ``zero_optimization`` section of one row."""
    keys = [key for key, on in (("offload_optimizer", optimizer), ("offload_param", params)) if on]
    return {"stage": stage, **{key: {"device": "cpu"} for key in keys}}


def _print_planned(
    model: nn.Module, gpus: int, nodes: int, rows: Sequence[tuple[str, dict[str, Any], bool]]
) -> None:
    """Print the same rows from the planner: bf16 with Adam, at the peak of a step, without activations."""
    print(
        "Planned for this package (see ds plan for details):\n  per CPU  |  per GPU |   Options",
        file=sys.stderr,
    )
    for options, section, zero_init in rows:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": section,
        }
        found = answer(
            PlanRequest(module=model, config=config, ranks=gpus * nodes, nodes=nodes, zero_init=zero_init)
        )
        host, gpu = (found.need(place)[0] for place in (MemoryPlace.HOST, MemoryPlace.DEVICE))
        _print_rows([(host, gpu, options)], sys.stderr)


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _millions(count: int) -> str:
    return f"{count / 1e6:.0f}M"


def _print_table(model: str, gpus: int, nodes: int, rows: Iterable[tuple[int, int, str]]) -> None:
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node.\n"
        f"SW: {model}\n"
        "  per CPU  |  per GPU |   Options"
    )
    _print_rows(rows)


def _print_rows(rows: Iterable[tuple[int, int, str]], file: Any = None) -> None:
    for host, gpu, options in rows:
        print(f" {host / _GB:7.2f}GB | {gpu / _GB:6.2f}GB | {options}", file=file)
