"""Features that change arithmetic, as formulas in plain PyTorch: layers, and optimizers that torch has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cells.cell import DECAY, EPS, FREEZE, GAMMA, MAX_TOKENS, MIN_TOKENS, RATE, STEPS, THETA, Cell

LORA_RANK, LORA_SCALE = 4, 2.0
BLOCK = 2
"""Tokens of a block of sparse attention."""


def theta_at(cell: Cell, step: int) -> float:
    """Share of a block's output that progressive layer drop keeps at a step, from 0."""
    return (1 - THETA) * float(torch.tensor(-GAMMA * step).double().exp()) + THETA if cell.layer_drop else 1.0


def length_at(cell: Cell, step: int) -> int | None:
    """Tokens of a sequence at a step, from 0; None: as many as there are."""
    if cell.lengths == "whole":
        return None
    grown = MIN_TOKENS + (MAX_TOKENS - MIN_TOKENS) * (step + 1) / STEPS
    return max(MIN_TOKENS, min(MAX_TOKENS, int(grown // 2 * 2)))


def kept_at(cell: Cell, step: int) -> int | None:
    """Tokens of a sequence that the first layer works on at a step, from 0; None: all."""
    if not cell.token_drop:
        return None
    return min(MAX_TOKENS, int((MIN_TOKENS + (MAX_TOKENS - MIN_TOKENS) * step / STEPS) // 2 * 2))


def window(tokens: int) -> Tensor:
    """Bool [tokens, tokens]: a token sees those before it in its own block and in the one before."""
    at = torch.arange(tokens)
    blocks = at // BLOCK
    return (at[:, None] >= at) & (blocks[:, None] - blocks <= 1)


# -------------------------------------------------------------------------------------------------- layers


class Lora(nn.Module):
    """A frozen linear layer plus a low-rank one, named as in ``deepspeed.linear``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.lora_weight_1 = nn.Linear(inputs, LORA_RANK, bias=False)
        self.lora_weight_2 = nn.Linear(LORA_RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.lora_weight_2(self.lora_weight_1(x))
        return functional.linear(x, self.weight, self.bias) + LORA_SCALE * beside


def rounded8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` in 8-bit floating point, scaled by the largest power of two at which none is too large."""
    largest, limit = float(values.abs().max()), torch.finfo(dtype).max
    if largest == 0:
        return values.clone()
    scale = 2.0 ** torch.floor(torch.log2(torch.tensor(limit / largest, dtype=torch.float64))).item()
    return ((values.float() * scale).to(dtype).float() / scale).to(values.dtype)


class _Product8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, small = rounded8(x, torch.float8_e4m3fn), rounded8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, small)
        ctx.dtype = weight.dtype
        return x @ small.T.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = rounded8(grads[0], torch.float8_e5m2)
        return grad @ weight.to(grad.dtype), (grad.T @ x).to(ctx.dtype)


class Linear8(nn.Linear):
    """Inputs and weights in E4M3, gradients of outputs in E5M2."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.bfloat16() if torch.is_autocast_enabled("cpu") else input
        with torch.autocast("cpu", enabled=False):
            out = _Product8.apply(x.reshape(-1, x.shape[-1]), self.weight)
            return (
                out.view(*x.shape[:-1], -1) + self.bias.to(out.dtype)
                if self.bias is not None
                # type: ignore[redundant-expr]
                else (out.view(*x.shape[:-1], -1))
            )


def quantized(values: Tensor, dim: int | None) -> Tensor:
    """8 bits with one scale for all, or along ``dim``; gradients pass straight through."""
    wide = values.detach().float()
    largest = wide.abs().max() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = largest.clamp(min=1e-30) / 128
    levels = (wide / scale).round().clamp(-128, 127)
    return values + ((levels * scale).to(values.dtype) - values).detach()


class Compressed(nn.Linear):
    """Return a layer ``up`` transformed by ``compression``."""

    def __init__(self, inputs: int, outputs: int, kind: str) -> None:
        super().__init__(inputs, outputs)
        self.kind, self.mask = kind, Tensor()

    @torch.no_grad()
    def prune(self) -> None:
        """Keeps the larger half of the weights as they are now, in full: wires and 16 bits make ties."""
        sizes = self.weight.abs()
        self.mask = sizes >= sizes.flatten().sort(descending=True).values[sizes.numel() // 2 - 1]

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if self.kind == "weights":
            weight = quantized(weight, None)
        if self.kind == "activations":
            input = quantized(input, -1)
        if self.kind == "pruning":
            weight = weight * self.mask.to(weight.dtype)
        return functional.linear(input, weight, self.bias)


def makes_linear(cell: Cell) -> Callable[..., nn.Module]:
    """The oracle's class of linear layers whose sizes are multiples of 16."""
    return Linear8 if cell.fp8 else nn.Linear


def makes_feed(cell: Cell) -> Callable[[int, int, str], nn.Module]:
    """The oracle's layers of a feed-forward part, by sizes and name."""
    if cell.lora:
        return lambda inputs, outputs, name: Lora(inputs, outputs)
    if cell.compression != "no":
        return lambda inputs, outputs, name: (
            Compressed(inputs, outputs, cell.compression) if name == "up" else nn.Linear(inputs, outputs)
        )
    return lambda inputs, outputs, name: makes_linear(cell)(inputs, outputs)


# ----------------------------------------------------------------------------------------------- optimizers


class Formula(torch.optim.Optimizer):
    """``update(param, gradient, state, step, rate)`` of each parameter; ``names`` tells their names."""

    def __init__(self, params: Any, lr: float = RATE, names: dict[Tensor, str] | None = None) -> None:
        super().__init__(params, {"lr": lr})
        self.names = names or {}
        self.updates = 0

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], rate: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] (no closure)
        self.updates += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    self.update(param, param.grad, state, group["lr"])


def moments(state: dict[str, Any], grad: Tensor, *, squares: bool = True) -> tuple[Tensor, Tensor]:
    """Adam's, advanced and not corrected; without ``squares`` the variance stays. ``seen`` counts its gradients."""
    state["seen"] = state.get("seen", 0) + squares
    m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * grad
    v = state.get("v", torch.zeros_like(grad))
    state["v"] = 0.999 * v + 0.001 * grad * grad if squares else v
    return m, state["v"]


def denominator(state: dict[str, Any]) -> Tensor:
    """Adam's, of a variance that has seen some gradients."""
    return (state["v"] / (1 - 0.999 ** max(1, state["seen"]))).sqrt() + EPS


def adam(param: Tensor, state: dict[str, Any], rate: float) -> None:
    """AdamW, whose variance may have seen fewer gradients than its momentum."""
    direction = state["m"] / (1 - 0.9 ** state["step"]) / denominator(state)
    param.mul_(1 - rate * DECAY).sub_(rate * direction)


def fill(state: dict[str, Any], grad: Tensor) -> None:
    """Elements that had no gradient so far get the mean variance of their tensor, or of its first gradients."""
    if not state.setdefault("filled", False):
        mean = state["v"].mean() if state["v"].any() else 0.001 * grad.square().mean()
        state["v"].masked_fill_(state["v"] == 0, float(mean) or 1.0)
        state["filled"] = True


class RootMeanSquare(Formula):
    """What a script's own class computes (``worker.Scripts``)."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], rate: float) -> None:
        square = state["square"] = 0.5 * state.get("square", 0.0) + 0.5 * grad * grad
        param.sub_(rate * grad / (square.sqrt() + EPS))


class Lamb(Formula):
    """You et al. 2020, algorithm 2."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], rate: float) -> None:
        m, v = moments(state, grad)
        m, v = m / (1 - 0.9 ** state["step"]), v / (1 - 0.999 ** state["step"])
        direction = m / (v.sqrt() + EPS) + DECAY * param
        ratio = float(param.norm() / direction.norm().clamp(min=1e-30)) if param.any() else 1.0
        state["ratio"] = min(10.0, max(0.01, ratio)) if direction.any() else 1.0
        param.sub_(rate * state["ratio"] * direction)


class Muon(Formula):
    """Jordan et al. 2024 for hidden matrices, AdamW for the rest, as for embeddings and heads. Stacked experts are a
    matrix each; what else has more dimensions is a matrix of the first one by all others."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], rate: float) -> None:
        name = self.names[param].lower()
        stacked = ".experts." in name and "deepspeed_experts" not in name
        if param.ndim < (3 if stacked else 2) or "embed" in name or "lm_head" in name:
            moments(state, grad)
            adam(param, state, rate)
            return
        m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * grad
        ahead = 0.9 * m + 0.1 * grad
        ahead = torch.stack([orthogonal(each) for each in ahead]) if stacked else orthogonal(ahead.flatten(1))
        param.mul_(1 - rate * DECAY).sub_(rate * ahead.view_as(param))


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of the paper's iteration, and the scale of tall matrices."""
    rows, columns = matrix.shape
    x = (matrix.T if rows > columns else matrix).double()
    x = x / x.norm().clamp(min=1e-300)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return ((x.T if rows > columns else x) * max(1.0, rows / columns) ** 0.5).to(matrix.dtype)


class OneBitAdam(Formula):
    """1-bit Adam whose exchange loses nothing: after ``FREEZE`` updates the variance stays."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], rate: float) -> None:
        warm = self.updates <= FREEZE
        moments(state, grad, squares=warm)
        if not warm:
            fill(state, grad)
        adam(param, state, rate)


class ZeroOneAdam(Formula):
    """0/1 Adam whose exchange loses nothing: the variance follows updates 1, 2, 4, 8, ... alone."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], rate: float) -> None:
        counts = self.updates & (self.updates - 1) == 0
        moments(state, grad, squares=counts)
        if not counts:
            fill(state, grad)
        adam(param, state, rate)


class LocalZeroOneAdam(Formula):
    """0/1 Adam with the variance of the first gradient: each copy moves along its own momentum, until ``agree``."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], rate: float) -> None:
        if self.updates == 1:
            moments(state, grad)
            adam(param, state, rate)
            return
        moments(state, grad, squares=False)
        fill(state, grad)
        if not state.get("rates"):
            state |= {"rates": 0.0, "from": param.clone(), "moved": torch.zeros_like(param)}
        corrected = rate / (1 - 0.9 ** state["step"])
        state["rates"] += corrected
        state["moved"] = state["moved"] + corrected * state["m"]
        state["from"] *= 1 - rate * DECAY
        param.copy_(state["from"] - state["moved"] / denominator(state))

    @torch.no_grad()
    def agree(self, param: Tensor, moved: Tensor) -> None:
        """Go on from the weights that all copies' mean of ``moved`` comes to, along its momentum."""
        state = self.state[param]
        param.copy_(state["from"] - moved / denominator(state))
        state["m"], state["rates"] = moved / state["rates"], 0.0


class OneBitLamb(Lamb):
    """1-bit LAMB (Li et al. 2021) with a lossless exchange: the mean trust ratio of the first updates, times the change
    estimated from a variance that is still updated."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], rate: float) -> None:
        if self.updates <= FREEZE:
            super().update(param, grad, state, rate)
            before = state.get("average")
            state["average"] = state["ratio"] if before is None else 0.9 * before + 0.1 * state["ratio"]
            return
        m, v = moments(state, grad, squares=False)
        fill(state, grad)
        fresh = state["fresh"] = 0.999 * state.get("fresh", v) + 0.001 * grad * grad
        frozen = (v / (1 - 0.999 ** max(1, state["seen"]))).sqrt() + EPS
        alone = m / (1 - 0.9 ** state["step"]) / frozen
        direction = alone + DECAY * param
        share = min(1.0, float(alone.norm() / direction.norm()))
        changed = float((frozen / ((fresh / (1 - 0.999 ** state["step"])).sqrt() + EPS)).max())
        factor, last = min(4.0, max(0.5, changed * share + 1 - share)), state.get("factor", 1.0)
        factor = state["factor"] = min(1.1 * last, max(0.9 * last, factor))
        param.sub_(rate * state["average"] * factor * direction)
