"""Documented helpers that look into a running backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def check_internal_apis_for_count_used_parameters() -> bool:
    """Return whether this torch can tell which parameters a running backward will reach."""
    return hasattr(torch.autograd.graph, "_get_grad_fn_or_grad_acc") and all(
        hasattr(torch._C, name) for name in ("_current_graph_task_id", "_will_engine_execute_node")
    )


def count_parameters(parameters: Iterable[Any], exact: bool) -> int:
    """Count the ``parameters`` that the running backward reaches; not ``exact``: those that require gradients."""
    trainable = [p for p in parameters if isinstance(p, Tensor) and p.requires_grad]
    if not exact:
        return len(trainable)
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError("count_used_parameters_in_backward must be called during backward execution")
    with torch.enable_grad():  # a parameter's node is found through a view of it
        nodes = [torch.autograd.graph._get_grad_fn_or_grad_acc(p) for p in trainable]
    return sum(torch._C._will_engine_execute_node(node) for node in nodes)
