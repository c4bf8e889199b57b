"""Gates, and the layer that dispatches tokens to experts on other ranks.

The gating functions return the documented dense tensors [tokens, experts, capacity]. The layer itself computes with
lists of choices (``routes.py``) and sorted tokens (``dispatch.py``), with the same result.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
from deepspeed.parallel.expert.dispatch import TokenOrder, route_to_experts
from deepspeed.parallel.expert.metrics import RoutingStats
from deepspeed.parallel.expert.routes import Routes, capacity_of, top1_routes, top2_routes, topk_routes
from deepspeed.parallel.tensor.mappings import join_sequence, split_sequence
from deepspeed.transforms.recompute.rng import RegionRNG

# For custom layers of scripts: splitting tokens that are replicated over tensor-parallel ranks, gathering them, and
# exchanging tokens between expert-parallel ranks, all with gradients. The tensor-parallel ranks are those of the newest
# engine's mesh; with one rank the input is returned.


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part along ``dim``; backward gathers the gradient from all ranks. Collective in backward.

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
    """Concatenate the parts of all ranks along ``dim``; the gradient is this rank's part. Collective."""
    return join_sequence(input_, _tensor_parallel(), dim)


class AllToAll(torch.autograd.Function):
    """``AllToAll.apply(group, input)``: split the first dim of ``input`` into one equal part per rank of ``group``,
    send part i to rank i, and return the received parts in rank order; backward returns the gradients likewise. Without
    a group the result equals ``input``. Collective, also in backward."""

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

# Timer names, for scripts that time their own layers.
MOE_TIMER = "moe"
FIRST_ALLTOALL_TIMER = "1st_a2a"
SECOND_ALLTOALL_TIMER = "2nd_a2a"

_AllToAll = AllToAll  # the documented name, for custom layers of scripts

Gating: TypeAlias = "tuple[Any, ...]"
"""``l_aux`` (scalar), ``combine_weights`` [S, E, C], ``dispatch_mask`` [S, E, C] (bool), ``exp_counts`` [E] (int64)."""


def multiplicative_jitter(x: Tensor, device: torch.device | str, epsilon: float = 0.01) -> Tensor:
    """Multiply ``x`` by factors drawn uniformly from ``[1 - epsilon, 1 + epsilon]`` (Switch Transformers, 2021)."""
    if epsilon == 0:
        return x
    return x * torch.empty_like(x, device=device).uniform_(1.0 - epsilon, 1.0 + epsilon)


def einsum(rule: str, a: Tensor, b: Tensor) -> Tensor:
    """Call ``torch.einsum`` with two tensors."""
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
    """Route each token of ``logits`` [S, E] to one expert; an expert takes at most
    ``C = max(ceil(S / E x capacity_factor), min_capacity)`` tokens.

    Returns ``l_aux`` (scalar), ``combine_weights`` [S, E, C], ``dispatch_mask`` [S, E, C] (bool), ``exp_counts`` [E].
    With ``sparse_routes`` or ``use_tutel``: ``l_aux``, C, E, then lists with one tensor [S] per choice (experts, slots,
    weights), and ``exp_counts``.

    Args:
        used_token: [S], 0 for padding.
        noisy_gate_policy: "RSample": choose by logits with Gumbel noise.
        drop_tokens: False: C is the largest number of tokens that any expert got, on any rank of ``ep_group``.
        use_rts: a full expert takes a random selection of its tokens; otherwise the first.
    """
    routes = top1_routes(
        logits,
        _limit_of(logits, capacity_factor, min_capacity, drop_tokens),
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
    """Route each token of ``logits`` [S, E] to two experts; an expert takes at most
    ``max(ceil(S / E x 2 capacity_factor), min_capacity)`` tokens. Returns the same as ``top1gating``.

    ``top2_2nd_expert_sampling``: choose the second expert by logits with Gumbel noise.
    """
    capacity = _limit_of(logits, 2 * capacity_factor, min_capacity, drop_tokens)
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
    """Route each token of ``logits`` [S, E] to ``k`` experts; an expert takes at most
    ``max(ceil(S / E x k capacity_factor), min_capacity)`` tokens: those of the largest softmax (``drop_policy``
    "probs") or the first ("position"). Returns the same as ``top1gating``."""
    capacity = _limit_of(logits, k * capacity_factor, min_capacity, drop_tokens)
    return _documented(topk_routes(logits, k, capacity, drop_policy=drop_policy), ep_group, sparse_routes)


def _limit_of(logits: Tensor, factor: float, minimum: int, drop_tokens: bool = True) -> int | None:
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
    """Computes logits in fp32, whatever the dtype of weight and input, also under autocast."""

    ds_in_full = True

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float())


class TopKGate(nn.Module):
    """Chooses ``k`` of ``num_experts`` experts for each token by a linear map, ``wg``, in fp32.

    Arguments as in ``deepspeed.parallel.expert.layer.MoE``.
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
        """Return the same routing as lists of choices, without communication."""
        noise = self.noisy_gate_policy if self.training else None
        scores = input.float()
        if noise == "Jitter":
            scores = multiplicative_jitter(scores, input.device)
        logits = self.wg(scores)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = _limit_of(logits, factor * self.k, self.min_capacity, self.drop_tokens)
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


def routes_of(gate: Any, tokens: Tensor, used_token: Tensor | None) -> Routes:
    """Return how ``gate`` routes ``tokens`` [S, hidden]: by its ``routes``, or by its forward if a derived class, the
    object itself or a hook of the user changes what that returns."""
    owner = next(kind for kind in type(gate).__mro__ if vars(kind).keys() & {"forward", "routes"})
    hooks = (*gate._forward_pre_hooks.values(), *gate._forward_hooks.values())
    heard = any(not str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks)
    if "routes" in vars(owner) and "forward" not in vars(gate) and not heard:
        return gate.routes(tokens, used_token)
    found = gate(tokens, used_token)
    return found if isinstance(found, Routes) else Routes.of_dense(*found)


def _own_part(routes: Routes, ranks: Communicator) -> Routes:
    """Return the routes of this rank's part of the tokens. All parts have the same length: padding of the last one has
    no expert. Backward gathers the gradient of the weights."""
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
    """Dispatches each token to the experts that ``gate`` chooses, on any rank, and sums up their weighted outputs.

    After a forward, ``l_aux`` is its load-balancing loss and ``exp_counts`` [E] the number of this rank's tokens that
    chose each expert.
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
        self._numbers = RegionRNG(Communicator(None))
        self.watch: RoutingStats | None = None

    def _set_ep_group(self, ep_group: ProcessGroup | None) -> None:
        """Set the ranks over which the layer's experts are spread."""
        self.spread_over(Communicator(None) if ep_group is None else communicator(ep_group))

    def spread_over(self, ranks: Communicator) -> None:
        if ranks.size != self.ep_size:
            raise ValueError(f"a layer with ep_size={self.ep_size} was given a group of {ranks.size} ranks")
        self.ep_group, self._ranks = ranks.group, ranks
        self.gate._set_ep_group(ranks.group)  # type: ignore[operator]

    def divide_tokens(self, ranks: Communicator) -> None:
        """Let each of ``ranks``, which hold the same tokens and experts (tensor parallelism), dispatch a part of the
        tokens."""
        self._numbers = RegionRNG(ranks)
        self.experts.divide_tokens(ranks.size > 1)  # type: ignore[operator]

    def forward(self, *input: Tensor, **kwargs: Any) -> Tensor:
        """Return the experts' output for tokens [.., hidden]. ``input``: the tokens, and optionally ``used_token``."""
        tokens, used_token = input[0], input[1] if len(input) > 1 else None
        flat = tokens.reshape(-1, tokens.shape[-1])
        routes = routes_of(self.gate, flat, used_token)
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
                f"the {self.ep_size} ranks that share the layer's experts are not known yet: call "
                "deepspeed.initialize, or the layer's set_deepspeed_parallelism()"
            )
        order_of = partial(TokenOrder.of, routes)
        with self._numbers.different():
            return route_to_experts(tokens, routes.weights, order_of, self._ranks, self.experts, self.watch)
