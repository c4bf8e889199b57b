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
            f"num_experts={num_experts}: expected one number; for a pyramid create one MoE layer per number"
        )
    return num_experts[0]


class MoE(nn.Module):
    """A layer of ``num_experts`` copies of ``expert``, of which each token uses ``k``.

    S. Rajbhandari et al.: DeepSpeed-MoE: Advancing mixture-of-experts inference and training to power next-generation
    AI scale, ICML 2022.

    Args:
        hidden_size: size of the last dim of the input and of the output of ``expert``.
        num_experts: a number, or a list with one number, as a script's options may hold it.
        ep_size: ranks over which the experts are spread; each holds ``num_experts / ep_size``.
        k: experts per token.
        capacity_factor: in training, an expert takes ``ceil(tokens / num_experts x k x capacity_factor)`` tokens of a
            rank, at least ``min_capacity``; in evaluation ``eval_capacity_factor`` applies.
        use_residual: the output is a learned mix of the experts' and that of a dense ``expert`` that all tokens use.
        noisy_gate_policy: in training, "Jitter" scales the gate's inputs, "RSample" adds noise to its logits (top-1).
        drop_tokens: False: experts take all tokens; nothing is dropped or padded.
        use_rts: a full expert takes a random selection of its tokens (top-1); otherwise the first.
        use_tutel: accepted and ignored: tokens are dispatched by sorting, without that library.
        enable_expert_tensor_parallelism: the layers of ``expert`` are themselves split over tensor-parallel ranks, so
            each of these ranks processes all tokens; otherwise each takes a part of the tokens.
        top2_2nd_expert_sampling: in training with k = 2, sample the second expert from the logits.
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
            f"num_experts={num_experts} must be a multiple of ep_size={ep_size}, so that all ranks hold the "
            "same number"
        )
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self.number = 0
        """Index among the mixture-of-experts layers of the whole model, set by ``deepspeed.initialize``."""
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
        """Spread the experts over ``ep_size`` of the ranks with the same dense weights: neighbours, or with
        ``use_data_before_expert_parallel_`` ranks as far apart as possible. ``deepspeed.initialize`` calls this."""
        mesh = groups.get_mesh()
        if mesh is None:
            mesh = ProcessMesh.build()
        assert isinstance(mesh, ProcessMesh)
        mesh.data_before_experts = use_data_before_expert_parallel_
        self.spread_over(mesh)

    def spread_over(self, mesh: ProcessMesh) -> None:
        """Assign this rank its experts, by its position among the ranks of ``mesh`` that share them. Collective.

        Raises:
            ValueError: ``ep_size`` does not divide the ranks with the same dense weights.
        """
        ranks, layer = mesh.sharing_experts(self.ep_size), self.deepspeed_moe
        layer.spread_over(mesh.among(ranks))
        mesh.expert_sizes.add(self.ep_size)
        layer.experts.set_rank(ranks.index(mesh.global_rank), self.ep_size)  # type: ignore[operator]
        if self.enable_expert_tensor_parallelism:
            mesh.splits_experts = True
        else:
            layer.divide_tokens(mesh.communicator("tp"))

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output [.., hidden_size], the load-balancing loss (a scalar, to be added to the model's loss with
        a coefficient), and how many of this rank's tokens chose each expert [num_experts].

        Args:
            hidden_states: tokens [.., hidden_size].
            used_token: one entry per token; 0 for padding, which goes to no expert.
        """
        layer = self.deepspeed_moe
        output = layer(hidden_states, used_token)
        if self.use_residual:
            shared = self.mlp(hidden_states)
            shared = shared[0] if isinstance(shared, tuple) else shared
            shares = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., 0:1] + shared * shares[..., 1:]
        return output, layer.l_aux, layer.exp_counts


# One rank's experts of a layer.

_MARKS = (ATTRIBUTE, "tensor_model_parallel", "model_parallel", "partition_dim", "partition_stride")
"""Attributes that tensor-parallel layers set on their parameters, and that copying a parameter loses."""


class Experts(nn.Module):
    """``num_local_experts`` copies of ``expert``, marked by the documented attributes as spread over ranks.

    ``expert_group_name``: "ep_size_N", if the layer's experts are spread over N ranks.
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
        """Number these experts as those of rank ``number`` of the ``count`` over which the layer's are spread."""
        each = self.num_local_experts
        self.deepspeed_experts.renumber(number * each, count * each)
        if count > 1:
            number_experts(self.deepspeed_experts.parameters())

    def divide_tokens(self, divide: bool) -> None:
        """Set whether tensor-parallel ranks, which hold copies of these experts, each take a part of the tokens."""
        for param in self.deepspeed_experts.parameters():
            setattr(param, DIVIDED, divide)

    def forward(self, inputs: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Apply each expert to its inputs. Returns the outputs in the shape and order of the inputs.

        Args:
            inputs: [tokens, hidden] sorted by expert, if ``counts`` gives the tokens per expert; otherwise the
                documented [ranks, experts, capacity, hidden].
        """
        if counts is not None and len(counts) == 1:
            return _output(self.deepspeed_experts[0](inputs))
        # An expert without tokens is called too: its weights get zero gradients, and ranks stay in step.
        dim = 1 if counts is None else 0
        chunks = inputs.chunk(self.num_local_experts, 1) if counts is None else inputs.split(list(counts))
        return torch.cat([_output(e(c)) for e, c in zip(self.deepspeed_experts, chunks, strict=True)], dim)


def _copy(expert: nn.Module) -> nn.Module:
    made = copy.deepcopy(expert)
    for new, old in zip(made.parameters(), expert.parameters(), strict=True):
        for mark in _MARKS:
            if hasattr(old, mark):
                setattr(new, mark, getattr(old, mark))
    return made


def _output(result: Any) -> Tensor:
    """Return an expert's output. Anything it returns besides (a bias not yet added) is ignored, as documented."""
    return result[0] if isinstance(result, tuple) else result
