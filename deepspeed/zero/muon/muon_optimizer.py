"""Muon for hidden matrices and Adam for everything else, as one optimizer that ZeRO can shard.

Momentum is per element, so it is sharded like the weights. Only the orthogonalization needs whole matrices:
``UpdateContext.whole_matrices`` assembles each at one owner rank (``zero/whole_matrices.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.collectives import communicator
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam
from deepspeed.ops.update import ALONE, Group, UpdateContext, UpdateTraits

# Muon (K. Jordan et al.: Muon: An optimizer for hidden layers in neural networks, 2024): the arithmetic, and plain
# optimizers for matrices that every rank holds whole.
#
# A step of Muon replaces the momentum of a matrix by (nearly) the closest orthogonal matrix, so that all directions
# move equally. Five steps of a quintic Newton-Schulz iteration bring every singular value near 1; the coefficients of
# the paper trade exactness (results lie between about 0.7 and 1.2) for speed.
#
# All products are in fp32 (the paper uses bf16 on GPUs), so that the result depends on the device's rounding no more
# than any other sum.

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 (Jordan et al. 2024)."""

METHODS = ("gram", "standard")


def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    """Return ``G`` [..., rows, cols] with singular values of about 1, in fp32, by iterating on the matrix itself."""
    a, b, c = COEFFICIENTS
    x, transposed = _prepared(G)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if transposed else x


def zeropower_via_gram_newtonschulz(G: Tensor, steps: int) -> Tensor:
    """Evaluate the same polynomial by iterating on the Gram matrix of the shorter side.

    Each step multiplies x by a polynomial of x x^T, and all of them commute. So it is enough to track the Gram matrix
    and the product of the polynomials, both [short, short], and to multiply by the matrix once: for a matrix with k
    times as many columns as rows, 2 long products instead of 2 per step.
    """
    a, b, c = COEFFICIENTS
    x, transposed = _prepared(G)
    gram = x @ x.mT
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    product = identity
    for _ in range(steps):
        factor = a * identity + b * gram + c * (gram @ gram)
        product = factor @ product
        gram = factor @ gram @ factor
    x = product @ x
    return x.mT if transposed else x


_ITERATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "gram": zeropower_via_gram_newtonschulz,
    "standard": zeropower_via_newtonschulz5,
}


def check_method(ns_method: str) -> None:
    """Raise ValueError if there is no such iteration."""
    if ns_method not in METHODS:
        raise ValueError(f"ns_method={ns_method!r} must be one of {', '.join(METHODS)}")


def _prepared(matrix: Tensor) -> tuple[Tensor, bool]:
    """Return the matrix in fp32 (fp64 stays), at most as tall as wide, with norm 1; and whether it was transposed.

    A power of 2, which rounds nothing, first brings the largest element near 1: only the direction counts, and
    squares of very large or small elements, as from a scaled loss, would leave the range of fp32. Zeros stay zeros.
    """
    if matrix.ndim < 2:
        raise ValueError(f"Muon updates matrices; a tensor of shape {tuple(matrix.shape)} is not one")
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.mT
    exponent = torch.frexp(x.abs().amax(dim=(-2, -1), keepdim=True)).exponent
    x = torch.ldexp(x, -exponent.clamp(-126, 126))  # so that the power of 2 itself is a normal number
    return x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny), transposed


def orthogonalize(
    update: Tensor, ns_steps: int = 5, ns_method: str = "gram", is_expert_group: bool = False
) -> Tensor:
    """Return Muon's direction for a parameter with momentum ``update``; same shape and dtype.

    More than two dims are flattened to [first, all others], or with ``is_expert_group`` taken as a batch of matrices.
    Tall matrices are scaled by sqrt(rows / cols), as in the paper's implementation.
    """
    check_method(ns_method)
    matrix = update if is_expert_group or update.ndim <= 2 else update.reshape(len(update), -1)
    result = _ITERATIONS[ns_method](matrix, ns_steps)
    scale = max(1.0, matrix.shape[-2] / matrix.shape[-1]) ** 0.5
    return (result * scale).to(update.dtype).reshape(update.shape)


def momentum_update(
    grads: Sequence[Tensor], momenta: Sequence[Tensor], beta: float, nesterov: bool
) -> list[Tensor]:
    """Update momenta (in place) and return the matrices to orthogonalize. Elementwise, with single rounded operations
    only, so that no bit depends on how tensors are partitioned."""
    fresh = torch._foreach_mul(list(grads), 1.0 - beta)
    torch._foreach_mul_(list(momenta), beta)
    torch._foreach_add_(list(momenta), fresh)
    if not nesterov:
        return [momentum.clone() for momentum in momenta]
    ahead = torch._foreach_mul(list(momenta), beta)
    torch._foreach_add_(ahead, fresh)
    return list(ahead)


def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
) -> Tensor:
    """Advance ``momentum`` (in place) by ``grad`` and return the orthogonalized update, shaped like ``grad``."""
    [update] = momentum_update([grad.to(momentum.dtype)], [momentum], beta, nesterov)
    return orthogonalize(update, ns_steps, ns_method, is_expert_group).to(grad.dtype)


def apply_update(param: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
    """Set ``param`` to ``param * (1 - lr * weight_decay) - lr * update``, in fp32, rounded once to its dtype."""
    wide = param.to(torch.promote_types(param.dtype, torch.float32))
    result = wide * (1.0 - lr * weight_decay) - update * lr
    param.copy_(result)


class SingleDeviceMuon(torch.optim.Optimizer):
    """Muon that updates all matrices on this rank. State: ``momentum_buffer``."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> None:
        check_method(ns_method)
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_method": ns_method}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group, [p for p in group["params"] if p.grad is not None])
        return loss

    def _update(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        for param in params:
            self._update_one(group, param)

    def _update_one(self, group: dict[str, Any], param: Tensor) -> None:
        assert param.grad is not None
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        update = muon_update(
            param.grad, state["momentum_buffer"], beta=group["momentum"], ns_method=group["ns_method"]
        )
        apply_update(param, update, float(group["lr"]), group["weight_decay"])


class Muon(SingleDeviceMuon):
    """Muon for matrices that all ranks hold whole, with equal gradients (as after an all-reduce): each rank
    updates its share of them and broadcasts it. Momenta exist on the owner only. ``step`` is collective."""

    def _update(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        everyone = communicator(dist.group.WORLD if dist.is_initialized() else None)
        for start in range(0, len(params), everyone.size):
            share = params[start : start + everyone.size]
            if everyone.rank < len(share):
                self._update_one(group, share[everyone.rank])
            for owner, param in enumerate(share):
                everyone.broadcast(param.data.view(-1), src=owner).wait()


GROUP_DEFAULTS: dict[bool, dict[str, Any]] = {
    True: {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"},
    False: {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
}
"""Defaults of a group with ``use_muon`` True, for matrices, or False, for embeddings, heads, biases and the like."""


MOMENTUM = "momentum_buffer"
_ADAM_DEFAULTS = {**GROUP_DEFAULTS[False], "bias_correction": True, "adam_w_mode": True}


class MuonWithAuxAdam(MultiTensorAdam):
    """Muon and AdamW by group. Groups set ``use_muon``: True for Muon (lr, momentum, weight_decay, ns_method), False
    for AdamW (lr, betas, eps, weight_decay); the defaults are those of the paper's implementation. In a Muon group
    with ``num_heads``, each matrix is a stack of that many matrices, which are orthogonalized separately."""

    update_traits = UpdateTraits(elementwise=False, whole_matrices=True)

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(list(param_groups), {})

    def add_param_group(self, param_group: Group) -> None:
        if not isinstance(param_group, dict) or "use_muon" not in param_group:
            raise ValueError(
                "MuonWithAuxAdam needs parameter groups with a key use_muon (True: Muon, False: Adam)"
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
            return  # no weight would change
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

    def of_stack(matrices: Tensor) -> Tensor:  # by the protocol, three dims are a stack
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
    """Build ``optimizer.type: Muon``: parameters flagged ``use_muon`` (``set_optimizer_flags``) use Muon, others
    Adam.

    Args:
        params: parameters or groups; a group that sets ``use_muon`` is used unchanged, others are split.
        lr: for both kinds, unless ``muon_lr``, ``adam_lr`` or the group itself overrides it.
        per_head_muon: orthogonalize each head of attention projections separately: parameters whose
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
        by_kind: dict[tuple[bool, int | None], list[Tensor]] = {}
        for param in group["params"]:
            use_muon = bool(group.get("use_muon", getattr(param, "use_muon", False)))
            heads = getattr(param, "muon_num_heads", None) if per_head_muon and use_muon else None
            by_kind.setdefault((use_muon, heads), []).append(param)
        for (use_muon, heads), chosen in sorted(by_kind.items(), key=lambda kind: not kind[0][0]):
            more = {} if heads is None else {"num_heads": heads}
            groups.append({**shared[use_muon], **group, **more, "params": chosen, "use_muon": use_muon})
    return MuonWithAuxAdam(groups)


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    groups = [dict(entry) for entry in given if isinstance(entry, dict)]
    bare = [entry for entry in given if not isinstance(entry, dict)]
    for group in groups:
        listed = group["params"]
        group["params"] = [listed] if torch.is_tensor(listed) else list(listed)
    return groups + ([{"params": bare}] if bare else [])
