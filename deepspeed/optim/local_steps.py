"""Local steps: every rank trains alone, and the ranks synchronize periodically (A. Douillard et al. 2023: DiLoCo:
Distributed low-communication training of language models)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam, adam_defaults
from deepspeed.ops.formats.codecs import BlockCodec, Codec, SignCodec
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.update import ALONE, Fragments, Group, HoldersOf, UpdateContext, UpdateTraits
from deepspeed.optim.one_bit import OneBitOptimizer, by_holders, round_into
from deepspeed.optim.sign_exchange import FEEDBACK, SignExchange

OWN, AGREED, OUTER = "own_weights", "agreed_weights", "outer_momentum"
"""State entries: this rank's weights (the masters themselves), the common weights after the last outer update, and
the momentum of the outer updates."""
CODECS: dict[str, Codec | None] = {
    "none": None,
    "int8": BlockCodec(8),
    "int4": BlockCodec(4),
    "signs": SignCodec(),
}


class DiLoCo(OneBitOptimizer, MultiTensorAdam):
    """AdamW on each rank's local gradients for ``sync_every`` updates, without communication. Then the mean change of
    the weights over the ranks is the gradient of one outer update, SGD with Nesterov momentum, of the last common
    weights; all ranks continue from the result. AdamW's moments stay local to each rank.

    Args:
        params: iterable of parameters or of dicts that define groups.
        sync_every: updates between two outer ones (H of the paper).
        outer_lr, outer_momentum: learning rate and momentum of the outer update.
        warmup_steps: updates with fully summed gradients before the local ones.
        codec: encoding of the weight changes: "none" (fp32, one all-reduce), "int8", "int4", "signs"; with error
            feedback.

    With ZeRO 1 and 2, groups of ranks share a copy each (``mics_shard_size``). ValueError: an argument out of range.
    """

    update_traits = UpdateTraits(
        elementwise=True,
        own_communication=True,
        local_weights=True,
        rank_state=(FEEDBACK, OWN, "exp_avg", "exp_avg_sq"),
    )
    extra_state_names = (FEEDBACK, AGREED, OUTER)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        sync_every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        warmup_steps: int = 0,
        codec: str = "none",
    ) -> None:
        if int(sync_every) < 1:
            raise ValueError(f"DiLoCo: sync_every={sync_every!r} must be at least 1")
        if codec not in CODECS:
            raise ValueError(f"DiLoCo: codec={codec!r} must be one of {', '.join(CODECS)}")
        if int(warmup_steps) < 0 or not 0 <= outer_momentum < 1 or outer_lr <= 0:
            raise ValueError(
                f"DiLoCo: warmup_steps={warmup_steps!r}, outer_momentum={outer_momentum!r} and outer_lr={outer_lr!r} "
                "must be at least 0, in [0, 1) and positive"
            )
        super().__init__(params, adam_defaults(lr, bias_correction, betas, eps, weight_decay))
        self.sync_every = int(sync_every)
        self.outer_lr, self.outer_momentum = float(outer_lr), float(outer_momentum)
        self.warmup_steps = int(warmup_steps)
        self.codec = CODECS[codec]
        if self.codec is not None:
            self.exchange = SignExchange(self.codec)
        self.exchanges = 0
        """Number of outer updates."""

    def warms_up(self, update: int) -> bool:
        return update <= self.warmup_steps

    def syncs_at(self, update: int) -> bool:
        return update > self.warmup_steps and (update - self.warmup_steps) % self.sync_every == 0

    def state_for(self, param: Tensor, group: Group) -> dict[str, Any]:
        new = AGREED not in self.state[param]
        state = super().state_for(param, group)
        if new:
            state[AGREED].copy_(param.detach())
        state[OWN] = param.detach()
        return state

    def step_fragments(
        self, fragments: Sequence[Fragments], *, grad_scale: float = 1.0, context: UpdateContext = ALONE
    ) -> None:
        self.updates += 1
        MultiTensorOptimizer.step_fragments(self, fragments, grad_scale=grad_scale)
        if self.warms_up(self.updates):
            self._record_agreed(fragments)
        elif self.syncs_at(self.updates):
            with torch.no_grad():
                for number, part in enumerate(fragments):
                    if part.masters:
                        self._outer_update(number, list(part.masters), context.holders)
                        for master, low in zip(part.masters, part.lows, strict=True):
                            round_into(low, master)
            self.exchanges += 1

    @torch.no_grad()
    def _record_agreed(self, fragments: Sequence[Fragments]) -> None:
        for part in fragments:
            for master in part.masters:
                self.state[master][AGREED].copy_(master)

    def _outer_update(self, number: int, masters: list[Tensor], holders: HoldersOf | None) -> None:
        """Run the outer update. ``holders`` None: all ranks have the same weights."""
        states = [self.state[master] for master in masters]
        moved = [state[AGREED] - master for state, master in zip(states, masters, strict=True)]
        if self.codec is not None:
            self.exchange_means(number, masters, moved, holders)
        else:
            for _, ranks, positions in by_holders(masters, holders):
                _mean([moved[i] for i in positions], ranks)
        for master, state, gradient in zip(masters, states, moved, strict=True):
            momentum = state[OUTER].mul_(self.outer_momentum).add_(gradient)
            step = gradient.add_(momentum, alpha=self.outer_momentum)
            master.copy_(state[AGREED].sub_(step, alpha=self.outer_lr))

    def server_errors(self, masters: Sequence[Sequence[Tensor]]) -> dict[int, list[tuple[int, Tensor]]]:
        """Return the server errors; called before the state is saved, so it first refers ``OWN`` to the masters'
        current memory."""
        for master, state in self.state.items():
            if OWN in state:
                state[OWN] = master.detach()
        return super().server_errors(masters)

    def rank_state_dict(self) -> dict[str, Any]:
        return {**super().rank_state_dict(), "exchanges": self.exchanges}

    def load_rank_state_dict(self, saved: Any, rank: int, ranks: int) -> None:
        super().load_rank_state_dict(saved, rank, ranks)
        with torch.no_grad():
            for master, state in self.state.items():
                if OWN in state and state[OWN].data_ptr() != master.data_ptr():
                    master.copy_(state[OWN])
        self.exchanges = int(saved[0].get("exchanges", 0)) if len(saved) else 0


def _mean(values: Sequence[Tensor], ranks: Communicator) -> None:
    """Replace ``values`` by their means over ``ranks``."""
    flat = torch.cat([value.reshape(-1) for value in values])
    ranks.all_reduce(flat, scale=1.0 / ranks.size).wait()
    pieces = flat.split([value.numel() for value in values])
    torch._foreach_copy_(list(values), [p.view(v.shape) for p, v in zip(pieces, values, strict=True)])
