"""The mixture-of-experts layer of a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.numbered import NumberedModules
from deepspeed.checkpoint.placement import ATTRIBUTE, number_experts
from deepspeed.comm import documented_groups as groups
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.parallel.expert.sharded_moe import MOELayer, TopKGate
from deepspeed.zero.replica_groups import DIVIDED


def _of_one_layer(num_experts: int | Sequence[int]) -> int:
    if not isinstance(num_experts, Sequence):
        return num_experts
    if len(num_experts) != 1:
        raise ValueError(
            f"num_experts={num_experts}: a layer has one number of experts; for a pyramid make one MoE layer for each"
        )
    return num_experts[0]


class MoE(nn.Module):
    """``num_experts`` copies of ``expert``, of which each token uses ``k``.

    S. Rajbhandari et al.: DeepSpeed-MoE: Advancing mixture-of-experts inference and training to power next-generation
    AI scale, ICML 2022.

    Args:
        hidden_size: size of the last dim of the input, which ``expert`` keeps.
        num_experts: a number, or a list of one, as the options of scripts hold it.
        ep_size: ranks that share the experts of the layer; each holds ``num_experts / ep_size``.
        k: experts per token.
        capacity_factor: an expert takes ``ceil(tokens / num_experts x k x capacity_factor)`` tokens of a rank in
            training, at least ``min_capacity``; ``eval_capacity_factor`` counts in evaluation.
        use_residual: the output is a learned mix of the expert's and that of one that all tokens use.
        noisy_gate_policy: "Jitter" scales the gate's inputs, "RSample" adds noise to its logits (top-1), in training.
        drop_tokens: False: experts take all tokens; nothing is dropped or padded.
        use_rts: draw which tokens a full expert takes (top-1); otherwise it takes the first.
        use_tutel: accepted; tokens are dispatched by sorting without that library.
        enable_expert_tensor_parallelism: the expert's layers are split over tensor-parallel ranks themselves, which
            therefore all get all tokens; otherwise each of these ranks takes a part of the tokens.
        top2_2nd_expert_sampling: in training, draw the second of two experts by its logits.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int | Sequence[int] = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        num_experts = _of_one_layer(num_experts)
        assert num_experts % ep_size == 0, (
            f"num_experts={num_experts} must be a multiple of ep_size={ep_size}, so that every rank holds equally many"
        )
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self.number = 0
        """Among the layers with experts of the whole model; ``deepspeed.initialize`` finds it."""
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(
            gate,
            Experts(expert, self.num_local_experts, self.expert_group_name),
            self.expert_group_name,
            ep_size,
            self.num_local_experts,
            use_tutel=use_tutel,
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Find the ranks that share the experts: ``ep_size`` neighbours of those with the same dense weights, or with
        ``use_data_before_expert_parallel_`` ranks as far apart as possible. ``deepspeed.initialize`` calls this."""
        mesh = groups.get_mesh()
        if mesh is None:
            mesh = ProcessMesh.build()
        assert isinstance(mesh, ProcessMesh)
        mesh.data_before_experts = use_data_before_expert_parallel_
        self.spread_over(mesh)

    def spread_over(self, mesh: ProcessMesh) -> None:
        """This rank's experts are those of its place among the ranks of ``mesh`` that share them. Collective.

        Raises:
            ValueError: ``ep_size`` does not divide the ranks with the same dense weights.
        """
        ranks, layer = mesh.sharing_experts(self.ep_size), self.deepspeed_moe
        layer.spread_over(mesh.among(ranks))
        layer.experts.set_rank(ranks.index(mesh.global_rank), self.ep_size)  # type: ignore[operator]
        if self.enable_expert_tensor_parallelism:
            mesh.splits_experts = True
        else:
            layer.divide_tokens(mesh.communicator("tp"))

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output [.., hidden_size], the balancing loss (a scalar, to be added to the model's with a coefficient),
        and how many of this rank's tokens chose each expert [num_experts].

        Args:
            hidden_states: tokens [.., hidden_size].
            used_token: 0 for what is no token (padding), one entry for each: these go to no expert.
        """
        layer = self.deepspeed_moe
        output = layer(hidden_states, used_token)
        if self.use_residual:
            shared = self.mlp(hidden_states)
            shared = shared[0] if isinstance(shared, tuple) else shared
            shares = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., 0:1] + shared * shares[..., 1:]
        return output, layer.l_aux, layer.exp_counts


# The experts of a layer that one rank holds.

_MARKS = (ATTRIBUTE, "tensor_model_parallel", "model_parallel", "partition_dim", "partition_stride")
"""What tensor-parallel layers write on their parameters, and a copy of a parameter loses."""


class Experts(nn.Module):
    """``num_local_experts`` copies of ``expert``, of which the documented marks say that they are spread over ranks.

    ``expert_group_name``: "ep_size_N", where N ranks share the experts of the layer.
    """

    def __init__(
        self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.deepspeed_experts = NumberedModules(_copy(expert) for _ in range(num_local_experts))
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = expert_group_name  # type: ignore[attr-defined]

    def set_rank(self, number: int, count: int) -> None:
        """These are the experts of rank ``number`` of the ``count`` that share the layer's."""
        each = self.num_local_experts
        self.deepspeed_experts.renumber(number * each, count * each)
        if count > 1:
            number_experts(self.deepspeed_experts.parameters())

    def divide_tokens(self, divide: bool) -> None:
        """Set whether tensor-parallel ranks, which hold copies of these experts, each take a part of the tokens."""
        for param in self.deepspeed_experts.parameters():
            setattr(param, DIVIDED, divide)

    def forward(self, inputs: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Each expert's outputs, in the shape and order of the inputs.

        Args:
            inputs: [tokens, hidden] sorted by expert, if ``counts`` says how many each gets; otherwise the documented
                [ranks, experts, capacity, hidden].
        """
        if counts is None:
            chunks = inputs.chunk(self.num_local_experts, dim=1)
            return torch.cat(
                [_output(e(c)) for e, c in zip(self.deepspeed_experts, chunks, strict=True)], dim=1
            )
        if len(counts) == 1:
            return _output(self.deepspeed_experts[0](inputs))
        # Also an expert without tokens is called: its weights get zeros as gradients, and ranks stay in step.
        chunks = inputs.split(list(counts))
        return torch.cat([_output(e(c)) for e, c in zip(self.deepspeed_experts, chunks, strict=True)])


def _copy(expert: nn.Module) -> nn.Module:
    made = copy.deepcopy(expert)
    for new, old in zip(made.parameters(), expert.parameters(), strict=True):
        for mark in _MARKS:
            if hasattr(old, mark):
                setattr(new, mark, getattr(old, mark))
    return made


def _output(result: Any) -> Tensor:
    """Experts may return more than their output (a bias that was not added), which is left alone as documented."""
    return result[0] if isinstance(result, tuple) else result
