"""Muon for hidden matrices and Adam for everything else, as one optimizer that ZeRO can shard.

Momentum is per element, so its shards stay where the shards of the weights are. Only the orthogonalization needs
whole matrices: ``UpdateContext.whole_matrices`` assembles each at one owner (``zero/whole_matrices.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam
from deepspeed.ops.update import ALONE, Group, UpdateContext, UpdateTraits
from deepspeed.zero.muon.original_muon import (
    GROUP_DEFAULTS,
    METHODS,
    apply_update,
    check_method,
    momentum_update,
    orthogonalize,
)

MOMENTUM = "momentum_buffer"
_ADAM_DEFAULTS = {**GROUP_DEFAULTS[False], "bias_correction": True, "adam_w_mode": True}


class MuonWithAuxAdam(MultiTensorAdam):
    """Groups set ``use_muon``: True for Muon (lr, momentum, weight_decay, ns_method), False for AdamW (lr, betas, eps,
    weight_decay). Values that a group does not set default to those of the paper's implementation. In a Muon group
    with ``num_heads``, each matrix is a stack of that many matrices, which are orthogonalized separately."""

    update_traits = UpdateTraits(elementwise=False, whole_matrices=True)

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(list(param_groups), {})

    def add_param_group(self, param_group: Group) -> None:
        if not isinstance(param_group, dict) or "use_muon" not in param_group:
            raise ValueError(
                "MuonWithAuxAdam takes parameter groups with a key use_muon (True: Muon, False: Adam)"
            )
        defaults = GROUP_DEFAULTS[True] if param_group["use_muon"] else _ADAM_DEFAULTS
        for key, value in defaults.items():
            param_group.setdefault(key, value)
        check_method(param_group.get("ns_method", METHODS[0]))
        super().add_param_group(param_group)

    def state_for(self, param: Tensor, group: Group) -> dict[str, Any]:
        if not group["use_muon"]:
            return super().state_for(param, group)
        state = self.state[param]
        if MOMENTUM not in state:
            dtype = self._state_dtype(param, group)
            state[MOMENTUM] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        return state

    @torch.no_grad()
    def multi_tensor_step(
        self,
        group: Group,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        grad_scale: float = 1.0,
        low_precision: Sequence[Tensor | None] | None = None,
        context: UpdateContext = ALONE,
    ) -> None:
        if not group["use_muon"]:
            super().multi_tensor_step(
                group, params, grads, grad_scale=grad_scale, low_precision=low_precision, context=context
            )
            return
        momenta = [self.state_for(param, group)[MOMENTUM] for param in params]
        scaled = [g.to(m.dtype) * grad_scale for g, m in zip(grads, momenta, strict=True)]
        updates = momentum_update(scaled, momenta, group["momentum"], nesterov=True) if params else []
        lr = float(group["lr"])
        if lr == 0.0:
            return  # no weight would change: no need to orthogonalize
        _orthogonalize(group, params, updates, context)
        for param, update in zip(params, updates, strict=True):
            apply_update(param, update.view(param.shape), lr, group["weight_decay"])
        for param, low in zip(params, low_precision or [None] * len(params), strict=True):
            if low is not None:
                low.copy_(param.view(low.shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if group["use_muon"]:
                for param in group["params"]:
                    self.state.get(param, {}).pop("step", None)  # Muon does not count steps


def _orthogonalize(
    group: Group, params: Sequence[Tensor], updates: list[Tensor], context: UpdateContext
) -> None:
    heads, method = group.get("num_heads"), group["ns_method"]

    def function(matrix: Tensor) -> Tensor:
        if heads is None:
            return orthogonalize(matrix, ns_method=method)
        each = matrix.view(heads, -1, matrix.shape[-1])
        return orthogonalize(each, ns_method=method, is_expert_group=True).view(matrix.shape)

    def of_stack(matrices: Tensor) -> Tensor:  # three dims are a stack, by the protocol
        if matrices.ndim < 3:
            return function(matrices)
        return orthogonalize(matrices, ns_method=method, is_expert_group=True)

    if context.whole_matrices is not None:
        context.whole_matrices(group, params, updates, of_stack)
    else:
        updates[:] = map(function, updates)


def build_muon(
    params: Iterable[Any],
    lr: float | None = None,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
    ns_method: str = "gram",
    per_head_muon: bool = False,
) -> MuonWithAuxAdam:
    """``optimizer.type: Muon``: parameters flagged ``use_muon`` (``set_optimizer_flags``) go to Muon, others to Adam.

    Args:
        params: parameters or groups; a group that sets ``use_muon`` is taken as it is, others are split.
        lr: for both kinds, unless ``muon_lr`` or ``adam_lr`` or the group itself says otherwise.
        per_head_muon: orthogonalize each head of projections of attention by itself: parameters whose
            ``muon_num_heads`` is a number (``set_optimizer_flags``) get groups with ``num_heads``.
    """
    shared: dict[bool, dict[str, Any]] = {
        True: {"momentum": momentum, "weight_decay": weight_decay, "ns_method": ns_method},
        False: {"betas": betas, "eps": eps, "weight_decay": weight_decay},
    }
    for use_muon, rate in ((True, muon_lr), (False, adam_lr)):
        if rate is not None or lr is not None:
            shared[use_muon]["lr"] = rate if rate is not None else lr
    groups = []
    for group in _as_groups(params):
        for use_muon in (True, False):
            chosen = [
                p for p in group["params"] if group.get("use_muon", getattr(p, "use_muon", False)) == use_muon
            ]
            by_heads: dict[int | None, list[Tensor]] = {}
            for param in chosen:
                heads = getattr(param, "muon_num_heads", None) if per_head_muon and use_muon else None
                by_heads.setdefault(heads, []).append(param)
            for heads, params_of in by_heads.items():
                more = {} if heads is None else {"num_heads": heads}
                kept = {**shared[use_muon], **group, **more}
                groups.append({**kept, "params": params_of, "use_muon": use_muon})
    return MuonWithAuxAdam(groups)


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    groups = [dict(entry) for entry in given if isinstance(entry, dict)]
    bare = [entry for entry in given if not isinstance(entry, dict)]
    for group in groups:
        listed = group["params"]
        group["params"] = [listed] if torch.is_tensor(listed) else list(listed)
    return groups + ([{"params": bare}] if bare else [])
