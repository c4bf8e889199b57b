"""Gates and the layer that sends tokens to experts on other ranks.

The gating functions give the documented dense tensors [tokens, experts, capacity]; the layer itself computes with lists
of choices (``routes.py``) and sorted tokens (``dispatch.py``), which is the same result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed import comm as dist
from deepspeed.base.tracing import untraced
from deepspeed.comm import documented_groups as groups
from deepspeed.comm.collectives import Communicator, communicator
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.parallel.expert.dispatch import TokenExchange, TokenOrder, combine, halve, permute, run_experts
from deepspeed.parallel.expert.metrics import RouteWatch
from deepspeed.parallel.expert.routes import (
    Routes,
    capacity_of,
    top1_routes,
    top2_routes,
    topk_routes,
)
from deepspeed.parallel.tensor.mappings import join_sequence, split_sequence
from deepspeed.transforms.recompute.rng import RegionNumbers

# Tokens that tensor-parallel ranks all have, each taking a part of them, and back, with gradients: of the ranks
# of the newest engine's mesh, and with one of them the input is returned. For layers that a script writes itself
# also the exchange of tokens between ranks with different experts.


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """This rank's part along ``dim``; its gradient is gathered from all ranks. Collective in backward.

    Raises:
        AssertionError: the tensor-parallel ranks do not divide the extent.
    """
    ranks = _tensor_parallel()
    extent = input_.shape[dim]
    assert extent % ranks.size == 0, (
        f"{extent} tokens in dim {dim} cannot be divided among {ranks.size} tensor-parallel ranks"
    )
    return split_sequence(input_, ranks, dim)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """The parts of all ranks, one after the other along ``dim``; the gradient is this rank's part. Collective."""
    return join_sequence(input_, _tensor_parallel(), dim)


class AllToAll(torch.autograd.Function):
    """``AllToAll.apply(group, input)``: the first dim of ``input`` in as many equal parts as ``group`` has ranks, each
    sent to its rank; the result has their parts in rank order. Gradients travel back likewise. Without a group the
    result is ``input``. Collective, also in backward."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, input: Tensor) -> Tensor:
        ctx.ranks = Communicator(None) if group is None else communicator(group)
        return _exchanged(input, ctx.ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _exchanged(grads[0], ctx.ranks)


def _exchanged(parts: Tensor, ranks: Communicator) -> Tensor:
    if parts.shape[0] % ranks.size:
        raise ValueError(f"{parts.shape[0]} rows cannot be sent to {ranks.size} ranks in equal parts")
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    ranks.all_to_all(received, parts.contiguous()).wait()
    return received


def _tensor_parallel() -> Communicator:
    mesh = groups.get_mesh()
    return mesh.communicator("tp") if isinstance(mesh, ProcessMesh) else Communicator(None)


NOISE = (None, "None", "Jitter", "RSample")

# Names of timers, for scripts that time layers of their own.
MOE_TIMER = "moe"
FIRST_ALLTOALL_TIMER = "1st_a2a"
SECOND_ALLTOALL_TIMER = "2nd_a2a"

_AllToAll = AllToAll  # the documented name, for layers that a script writes itself

Gating: TypeAlias = "tuple[Any, ...]"
"""``l_aux`` (scalar), ``combine_weights`` [S, E, C], ``dispatch_mask`` [S, E, C] (bool), ``exp_counts`` [E] (int64)."""


def multiplicative_jitter(x: Tensor, device: torch.device | str, epsilon: float = 0.01) -> Tensor:
    """``x`` times factors drawn evenly from ``[1 - epsilon, 1 + epsilon]`` (Switch Transformers, 2021)."""
    if epsilon == 0:
        return x
    return x * torch.empty_like(x, device=device).uniform_(1.0 - epsilon, 1.0 + epsilon)


def einsum(rule: str, a: Tensor, b: Tensor) -> Tensor:
    """``torch.einsum`` of two tensors."""
    return torch.einsum(rule, a, b)


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Gating:
    """Each token [S, E] to one expert, which takes ``max(ceil(S / E x capacity_factor), min_capacity)`` of them.

    Returns ``l_aux`` (scalar), ``combine_weights`` [S, E, C], ``dispatch_mask`` [S, E, C] (bool), ``exp_counts`` [E].
    With ``sparse_routes`` or ``use_tutel``: ``l_aux``, the capacity, E, then lists with one tensor [S] for each choice
    (experts, places, weights), and ``exp_counts``.

    Args:
        used_token: [S], 0 for what is no token.
        noisy_gate_policy: "RSample": choose by logits with Gumbel noise.
        drop_tokens: False: C is the largest number that an expert got, on any rank of ``ep_group``.
        use_rts: draw which tokens a full expert takes; otherwise it takes the first.
    """
    routes = top1_routes(
        logits,
        _capacity(logits, capacity_factor, min_capacity, drop_tokens),
        used_token=used_token,
        rsample=noisy_gate_policy == "RSample",
        random_selection=use_rts,
    )
    return _documented(routes, ep_group, sparse_routes or use_tutel)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gating:
    """Each token [S, E] to two experts, each of which takes ``max(ceil(S / E x 2 capacity_factor), min_capacity)``.

    ``top2_2nd_expert_sampling``: the second is chosen by logits with Gumbel noise. Returns what ``top1gating`` does.
    """
    capacity = _capacity(logits, 2 * capacity_factor, min_capacity, drop_tokens)
    routes = top2_routes(logits, capacity, sample_second=top2_2nd_expert_sampling)
    return _documented(routes, ep_group, sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Gating:
    """Each token [S, E] to ``k`` experts, each of which takes ``max(ceil(S / E x k capacity_factor), min_capacity)``:
    those of the largest softmax (``drop_policy`` "probs") or the first ("position"). Returns what ``top1gating``
    does."""
    capacity = _capacity(logits, k * capacity_factor, min_capacity, drop_tokens)
    return _documented(topk_routes(logits, k, capacity, drop_policy=drop_policy), ep_group, sparse_routes)


def _capacity(logits: Tensor, factor: float, minimum: int, drop_tokens: bool = True) -> int | None:
    return capacity_of(len(logits), logits.shape[1], factor, minimum) if drop_tokens else None


def _documented(routes: Routes, ep_group: ProcessGroup | None, sparse: bool) -> Gating:
    capacity = routes.capacity
    if capacity is None:
        most = routes.exp_counts.max()
        if ep_group is not None and dist.get_world_size(ep_group) > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ep_group)
        capacity = int(most)
    if sparse:
        lists = [list(each.unbind(1)) for each in (routes.experts, routes.positions(), routes.weights)]
        return (routes.l_aux, capacity, len(routes.exp_counts), *lists, routes.exp_counts)
    return (routes.l_aux, *routes.dense(capacity), routes.exp_counts)


class _Router(nn.Linear):
    """Logits in fp32, whatever the dtype of weight and input, also under autocast."""

    ds_in_full = True

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float())


class TopKGate(nn.Module):
    """Chooses ``k`` of ``num_experts`` experts for each token by a linear map of it, ``wg``, in fp32.

    Arguments as of ``deepspeed.parallel.expert.layer.MoE``.
    """

    wg: nn.Linear

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ValueError(f"k={k}: a token can go to 1 to num_experts={num_experts} experts")
        if noisy_gate_policy not in NOISE:
            known = ", ".join(map(repr, NOISE))
            raise ValueError(f"noisy_gate_policy={noisy_gate_policy!r}: expected one of {known}")
        self.wg = _Router(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def _set_ep_group(self, ep_group: ProcessGroup | None) -> None:
        self.ep_group = ep_group

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> Gating:
        """Route tokens [S, model_dim]; returns the same as ``top1gating``."""
        return _documented(self.routes(input, used_token), self.ep_group, sparse_routes or use_tutel)

    def routes(self, input: Tensor, used_token: Tensor | None = None) -> Routes:
        """The same as lists of choices, without communication."""
        noise = self.noisy_gate_policy if self.training else None
        scores = input.float()
        if noise == "Jitter":
            scores = multiplicative_jitter(scores, input.device)
        logits = self.wg(scores)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = _capacity(logits, factor * self.k, self.min_capacity, self.drop_tokens)
        if self.k == 1:
            return top1_routes(
                logits,
                capacity,
                used_token=used_token,
                rsample=noise == "RSample",
                random_selection=self.use_rts,
            )
        if self.k == 2:
            return top2_routes(
                logits,
                capacity,
                used_token=used_token,
                sample_second=self.top2_2nd_expert_sampling and self.training,
            )
        return topk_routes(logits, self.k, capacity, used_token=used_token)


def _own_part(routes: Routes, ranks: Communicator) -> Routes:
    """Those of this rank's part of the tokens, of which each rank takes as many; what is missing in the last part has
    no expert. The gradient of the weights is gathered."""
    length = len(routes.experts)
    run = -(-length // ranks.size)
    own = slice(min(run * ranks.rank, length), min(run * (ranks.rank + 1), length))
    short = (0, 0, 0, run - (own.stop - own.start))
    return replace(
        routes,
        experts=F.pad(routes.experts[own], short),
        kept=F.pad(routes.kept[own], short),
        weights=split_sequence(routes.weights, ranks),
    )


class MOELayer(nn.Module):
    """Sends each token to the experts that ``gate`` chooses, on whichever rank they are, and adds up what comes back.

    After a forward ``l_aux`` is its balancing loss and ``exp_counts`` [E] says how many of this rank's tokens chose
    each expert.
    """

    l_aux: Tensor
    exp_counts: Tensor

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_group: ProcessGroup | None = None
        self.ep_size = ep_size
        self.ep_group_name = ep_group_name
        self.num_local_experts = num_local_experts
        self._ranks: Communicator | None = Communicator(None) if ep_size == 1 else None
        self._numbers = RegionNumbers(Communicator(None))
        self.watch: RouteWatch | None = None

    def _set_ep_group(self, ep_group: ProcessGroup | None) -> None:
        """The ranks that share the experts of the layer."""
        self.spread_over(Communicator(None) if ep_group is None else communicator(ep_group))

    def spread_over(self, ranks: Communicator) -> None:
        if ranks.size != self.ep_size:
            raise ValueError(f"a layer with ep_size={self.ep_size} was given a group of {ranks.size} ranks")
        self.ep_group, self._ranks = ranks.group, ranks
        self.gate._set_ep_group(ranks.group)  # type: ignore[operator]

    def divide_tokens(self, ranks: Communicator) -> None:
        """``ranks`` have the same tokens and the same experts (tensor parallelism): each sends a part of the tokens."""
        self._numbers = RegionNumbers(ranks)
        self.experts.divide_tokens(ranks.size > 1)  # type: ignore[operator]

    def forward(self, *input: Tensor, **kwargs: Any) -> Tensor:
        """``input``: tokens [.., hidden], and ``used_token`` or None."""
        tokens, used_token = input[0], input[1] if len(input) > 1 else None
        flat = tokens.reshape(-1, tokens.shape[-1])
        routes: Routes = self.gate.routes(flat, used_token)  # type: ignore[operator]
        self.l_aux, self.exp_counts = routes.l_aux, routes.exp_counts
        if self.watch is not None:
            self.watch.routed(routes.exp_counts, routes.kept, self.training)
        ranks = self._numbers.group
        if ranks.size == 1:
            return self._run_experts(flat, routes).view(tokens.shape)
        output = self._run_experts(split_sequence(flat, ranks), _own_part(routes, ranks))
        return join_sequence(output, ranks, 0, len(flat)).view(tokens.shape)

    @untraced
    def _run_experts(self, tokens: Tensor, routes: Routes) -> Tensor:
        if self._ranks is None:
            raise RuntimeError(
                f"the {self.ep_size} ranks that share the layer's experts are not known: call deepspeed.initialize, or "
                "set_deepspeed_parallelism() of the layer"
            )
        parts = halve(len(tokens), self._ranks, tokens.device)
        orders = [TokenOrder.of(routes, part) for part in parts]
        exchanges = TokenExchange.agree([order.counts for order in orders], self._ranks, self.watch)
        rows = [permute(tokens[part], order) for part, order in zip(parts, orders, strict=True)]
        with self._numbers.different():
            outputs = run_experts(rows, exchanges, self.experts)
        made = [
            combine(each, routes.weights[part], order)
            for each, part, order in zip(outputs, parts, orders, strict=True)
        ]
        return made[0] if len(made) == 1 else torch.cat(made)
