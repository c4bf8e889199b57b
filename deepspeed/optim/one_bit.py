"""Base of the 1-bit optimizers: update counts, local gradients, error feedback, and the state that each rank saves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.logging import log_dist_once
from deepspeed.comm.collectives import Communicator
from deepspeed.ops import momentum as momentum_kernels
from deepspeed.ops.multi_tensor import MultiTensorOptimizer, result_of
from deepspeed.ops.update import ALONE, Fragments, Group, HoldersOf, UpdateContext
from deepspeed.optim.sign_exchange import FEEDBACK, SignExchange

VAR_STEPS = "variance_steps"
"""State entry of a tensor: the number of gradients in its variance."""
PIECE = 1 << 15
"""Elements per piece: 128 KiB of each operand."""
MASK = "exp_avg_mask"
"""Group entry: a tensor of its parameters' size, 0 where their gradients are always exactly zero. Signs cannot encode
zero, so momenta would move there, and errors would accumulate."""
SHORT_MEMORY = 0.99
"""With a smaller beta2 a frozen variance averages few gradients, and is too small where those happened to be small."""
BACKENDS = ("nccl", "mpi", "compressed", "hccl", "gloo")


class OneBitOptimizer(MultiTensorOptimizer):
    """Base of optimizers that, after warm-up, send signs of momenta instead of gradients.

    ``updates`` counts updates; the first is number 1. Without an engine that leaves gradients unsummed, an update
    assumes that the given gradients are summed over all ranks.
    """

    extra_state_names: tuple[str, ...] = ()
    """fp32 state entries besides ``state_names``."""

    def __init__(
        self, params: Any, defaults: dict[str, Any], deepspeed: Any = None, comm_backend_name: str = "nccl"
    ) -> None:
        if comm_backend_name not in BACKENDS:  # all of them use the engine's own communication
            raise ValueError(
                f"{type(self).__name__}: comm_backend_name={comm_backend_name!r} must be one of {', '.join(BACKENDS)}"
            )
        self.deepspeed, self.comm_backend_name = deepspeed, comm_backend_name
        MultiTensorOptimizer.__init__(self, params, defaults)  # intermediate bases have other arguments
        self.updates = 0
        self.exchange = SignExchange()
        self._checked: dict[int, set[int]] = {}
        """By group that has run an update after warm-up: the masters whose variances are filled."""
        if (beta2 := defaults["betas"][1]) < SHORT_MEMORY:
            log_dist_once(
                f"{type(self).__name__} freezes a variance that remembers {1 / (1 - beta2):.0f} gradients, as "
                f"betas[1] is {beta2:g}: convergence may suffer from then on; 0.999 is usual for this optimizer",
                ranks=[0],
                level=logging.WARNING,
            )

    # Subclasses -----------------------------------------------------------------------------------------------

    def warms_up(self, update: int) -> bool:
        """Return whether this update needs the full sum of gradients."""
        raise NotImplementedError

    def update_after_warmup(
        self, number: int, group: Group, part: Fragments, grad_scale: float, context: UpdateContext
    ) -> None:
        """Update group ``number`` after warm-up, from this rank's gradients (summed ones if ``context`` has no
        ``holders``). ``part`` may be empty where other ranks have tensors and the update sums over fragments."""
        raise NotImplementedError

    def after_warmup_update(self, context: UpdateContext) -> None:
        """Follow an update with fully summed gradients; nothing by default."""

    def multi_tensor_step(self, group: Group, params: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        """Run an update of warm-up."""
        super().multi_tensor_step(group, params, *args, **kwargs)
        for param in params:
            self.state[param][VAR_STEPS] += 1

    # The protocol (``deepspeed/ops/update.py``) ---------------------------------------------------------------

    def wants_local_gradients(self) -> bool:
        return not self.warms_up(self.updates + 2)

    def step_fragments(
        self, fragments: Sequence[Fragments], *, grad_scale: float = 1.0, context: UpdateContext = ALONE
    ) -> None:
        self.updates += 1
        if self.warms_up(self.updates):
            super().step_fragments(fragments, grad_scale=grad_scale, context=context)
            self.after_warmup_update(context)
            return
        with torch.no_grad():
            for number, (group, part) in enumerate(zip(self.param_groups, fragments, strict=True)):
                if part.masters or context.segment_sum is not None:
                    self.update_after_warmup(number, group, part, grad_scale, context)

    def server_errors(self, masters: Sequence[Sequence[Tensor]]) -> dict[int, list[tuple[int, Tensor]]]:
        return self.exchange.server_errors(masters)

    def forget_server_errors(self) -> None:
        self.exchange.groups.clear()

    def rank_state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "exchange": self.exchange.saved()}

    def load_rank_state_dict(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        self._checked.clear()
        steps = [int(state["step"]) for state in self.state.values() if "step" in state]
        self.updates = int(saved[0]["updates"]) if len(saved) else max(steps, default=0)
        self.exchange.load([entry["exchange"] for entry in saved], rank, ranks)

    # State ----------------------------------------------------------------------------------------------------

    def state_for(self, param: Tensor, group: Group) -> dict[str, Any]:
        state = super().state_for(param, group)
        for name in self.extra_state_names:
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
        if VAR_STEPS not in state:  # new, or from a checkpoint without this entry
            state[VAR_STEPS] = torch.tensor(float(sum(map(self.warms_up, range(1, int(state["step"]) + 1)))))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        masks = [group.get(MASK) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, mask in zip(self.param_groups, masks, strict=True):
            group.pop(MASK, None)
            group.update({} if mask is None else {MASK: mask})
        self._checked.clear()
        for state in self.state.values():
            state.update({n: state[n].float() for n in (*self.extra_state_names, VAR_STEPS) if n in state})
        self.updates = max((int(s["step"]) for s in self.state.values() if "step" in s), default=0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grads: Any = None) -> Any:
        """Update all parameters that have a gradient; return the result of ``closure``."""
        if grads is not None:
            raise RuntimeError(
                f"{type(self).__name__}.step does not support grads=: set .grad of the parameters"
            )
        loss = result_of(closure)
        chosen = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        parts: list[Any] = [
            SimpleNamespace(masters=params, grads=[p.grad for p in params], lows=[None] * len(params))
            for params in chosen
        ]
        self.step_fragments(parts, context=self._own_context())
        torch.autograd.graph.increment_version([p for params in chosen for p in params])
        return loss

    # Parts of an update ---------------------------------------------------------------------------------------

    def exchange_means(
        self, number: int, masters: Sequence[Tensor], values: Sequence[Tensor], holders: HoldersOf | None
    ) -> None:
        """Replace ``values`` by their means over the ranks that hold the same masters."""
        errors = [self.state[master][FEEDBACK] for master in masters]
        for kind, ranks, positions in by_holders(masters, holders):
            chosen = [[column[i] for i in positions] for column in (masters, values, errors)]
            self.exchange.mean((number, kind), ranks, *chosen)
        mask = self.param_groups[number].get(MASK)
        for value, error in zip(values, errors, strict=True) if mask is not None else ():
            own = _mask_of(mask, value)
            value.mul_(own)
            error.mul_(own)

    def fill_variances(
        self, number: int, part: Fragments, grad_scale: float, context: UpdateContext
    ) -> list[Tensor]:
        """Fill zero variances of group ``number``, with which any momentum would move an element far away. An element
        without a gradient so far gets the mean variance of its tensor; if the whole tensor had none, the mean square
        of its first gradients. Of a tensor that joins after the group's first update the shard counts, since other
        ranks may not know that it is new. Return the masters that are new."""
        together = number not in self._checked or self.update_traits.segment_sums
        checked = self._checked.setdefault(number, set())
        new = [i for i, master in enumerate(part.masters) if id(master) not in checked]
        chosen = [part.masters[i] for i in new]
        checked.update(map(id, chosen))
        variances = [self.state[master]["exp_avg_sq"] for master in chosen]
        squares = _stacked(
            [(part.grads[i].float() * grad_scale).square().sum(dtype=torch.float64) for i in new]
        )
        mean_over_holders(squares, chosen, context)
        sums = _stacked([variance.sum(dtype=torch.float64) for variance in variances])
        columns = [sums, squares * (1.0 - self.param_groups[number]["betas"][1]), numels_of(chosen)]
        found = whole_sums(chosen, columns, context if together else ALONE)
        for variance, (total, square, numel) in zip(variances, found.tolist(), strict=True):
            fill = next((value / numel for value in (total, square) if value > 0), 1.0)
            variance.masked_fill_(variance == 0, fill)
        return chosen


def _mask_of(mask: Any, value: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.numel() != value.numel():
        size = mask.numel() if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"{MASK}: expected a tensor with {value.numel()} elements (a parameter of its group, or this rank's shard "
            f"of it), not {size}. Put parameters with masks into their own groups, and use ZeRO stage 0."
        )
    return mask.to(value.device, value.dtype).view(value.shape)


def whole_sums(masters: Sequence[Tensor], sums: Sequence[Tensor], context: UpdateContext) -> Tensor:
    """Return [n, k] fp64: k ``sums`` [n] of ``masters``, each summed over the whole tensor of its fragment if the
    update sums over fragments. Collective then."""
    own = torch.stack([one.cpu() for one in sums], dim=1)
    return own if context.segment_sum is None else context.segment_sum(list(masters), own)


def numels_of(masters: Sequence[Tensor]) -> Tensor:
    """Return the numbers of elements, [n] fp64."""
    return torch.tensor([master.numel() for master in masters], dtype=torch.float64)


def _stacked(sums: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(sums)) if sums else torch.zeros(0, dtype=torch.float64)


def mean_over_holders(values: Tensor, masters: Sequence[Tensor], context: UpdateContext) -> None:
    """Replace ``values`` [number of masters] by their means over the ranks that hold the same master. Collective."""
    for _, ranks, positions in by_holders(masters, context.holders):
        share = values[positions].to(masters[positions[0]].device)  # NCCL takes no CPU tensors
        ranks.all_reduce(share, scale=1.0 / ranks.size).wait()
        values[positions] = share.to(values.device)


def by_holders(
    masters: Sequence[Tensor], holders: HoldersOf | None
) -> Iterator[tuple[int, Communicator, list[int]]]:
    """Yield each kind of weights among ``masters`` (dense, experts): its number, the ranks that hold the same ones, and
    their positions in ``masters``. ``holders`` None: nothing."""
    for kind, (ranks, positions) in enumerate(holders(masters) if holders is not None else ()):
        if positions:
            yield kind, ranks, positions


def variance_steps(state: Mapping[str, Any]) -> float:
    """Return the number of gradients in a variance; a filled one counts as 1."""
    return max(1.0, float(state[VAR_STEPS]))


def round_into(low: Tensor | None, master: Tensor) -> None:
    """Round one updated master, or a piece of it, into the model's own weight."""
    if low is not None:
        low.copy_(master.reshape(low.shape))


def pieces(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield pieces of equal-sized tensors, on the host small enough to stay in cache over several operations: 1-D
    views, or the tensors themselves if they cannot be cut. None stays None."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in given):
        yield tensors
        return
    flat = [None if tensor is None else tensor.detach().view(-1) for tensor in tensors]
    for begin in range(0, given[0].numel(), PIECE):
        yield tuple(None if one is None else one[begin : begin + PIECE] for one in flat)


def ema_update(momenta: Sequence[Tensor], grads: Sequence[Tensor], grad_scale: float, beta1: float) -> None:
    """Compute ``momenta`` = beta1 * momenta + (1 - beta1) * grad_scale * grads in place."""
    for whole, whole_grad in zip(momenta, grads, strict=True):
        if momentum_kernels.update(whole, whole_grad, grad_scale, beta1):
            continue
        for momentum, grad in pieces(whole, whole_grad):
            wide = grad.to(torch.float32, copy=True)
            if grad_scale != 1.0:
                wide.mul_(grad_scale)
            momentum.mul_(beta1).add_(wide.mul_(1.0 - beta1))
