"""A small language model with experts, the same model in one process, and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.placement import local_part, placement_of
from deepspeed.parallel.expert.layer import Experts, MoE
from deepspeed.zero.params import is_zero_param
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param, safe_get_full_grad

VOCABULARY, HIDDEN, EXPERTS, LENGTH, BATCH = 32, 16, 4, 6, 2
EPS = 1e-4  # not so small that the first updates of Adam are the signs of what is zero but for rounding
NOTHING = {  # persistence and live parameters: gather everything around its use
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0,
}  # fmt: skip


Change = Callable[[nn.Sequential], nn.Module]
Recompute = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self, experts: int, ep_size: int, change: Change, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))
        self.moe = MoE(HIDDEN, change(expert), experts, ep_size, **settings)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output, l_aux, _ = self.moe(self.norm(hidden))
        return hidden + output, l_aux


class Model(nn.Module):
    """``pyramid``: experts of each layer. All experts of a layer differ. ``apart``: ranks that share them are no
    neighbours. ``place``: of this rank, and how many there are, with other data. ``recompute``: how blocks are
    checkpointed. ``change``: of each layer's expert."""

    def __init__(
        self,
        ep_size: int = 1,
        pyramid: Iterable[int] = (EXPERTS, EXPERTS),
        apart: bool = False,
        place: tuple[int, int] | None = None,
        recompute: Recompute | None = None,
        change: Change = lambda expert: expert,
        **settings: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        choice = {
            "k": 2,
            "drop_tokens": False,
            "top2_2nd_expert_sampling": False,
            "use_rts": False,
            **settings,
        }
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block(count, ep_size, change, **choice) for count in pyramid])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.recompute = recompute
        rank, world = place or (dist.get_rank(), dist.get_world_size())
        if not is_zero_param(self.head.weight):
            self._fill(rank * ep_size // world if apart else rank % ep_size)

    @torch.no_grad()
    def _fill(self, share: int) -> None:
        for number, block in enumerate(self.blocks):
            block.moe.deepspeed_moe.gate.wg.weight.mul_(4.0)
            experts = block.moe.deepspeed_moe.experts
            assert isinstance(experts, Experts)
            for index, expert in enumerate(experts.deepspeed_experts, share * experts.num_local_experts):
                own = torch.Generator().manual_seed(100 * number + index)
                for param in expert.parameters():
                    whole = 0.3 * torch.randn(placement_of(param).global_shape, generator=own)
                    param.copy_(local_part(param, whole))

    def forward(self, tokens: Tensor, coefficient: float = 0.01) -> Tensor:
        hidden, total = self.embed(tokens), torch.zeros(())
        for block in self.blocks:
            hidden, l_aux = self.recompute(block, hidden) if self.recompute else block(hidden)
            total = total + l_aux
        logits = self.head(hidden[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) + coefficient * total


def batch(step: int, rank: int) -> Tensor:
    """Ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + rank), generator=generator)


def config(stage: int, *, clip: float = 0.05, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **(NOTHING if stage == 3 else {}), **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": EPS, "weight_decay": 0.1}},
        "zero_optimization": zero,
        **more,
    }


def start(settings: dict[str, Any], ep_size: int, **model: Any) -> Any:
    return deepspeed.initialize(model=Model(ep_size, **model), config=settings)[0]


def assert_equals_alone(
    settings: dict[str, Any],
    ep_size: int,
    *,
    steps: int = 3,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    **model: Any,
) -> None:
    """Loss, norm, every gradient and every weight of some steps are those of one process with all experts and the
    batches of all ranks."""
    engine = start(settings, ep_size, **model)
    assert_engine_equals_alone(
        engine, Model(1, **{**model, "recompute": None}), steps=steps, rtol=rtol, atol=atol
    )
    engine.destroy()


def assert_engine_equals_alone(
    engine: Any,
    alone: nn.Module,
    *,
    place: tuple[int, int] | None = None,
    steps: int = 3,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """The same of an engine that begins with the weights of ``alone``. ``place``: of this rank, and how many there are,
    with other data."""
    rank, world = place or (dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=EPS, weight_decay=0.1)
    clip = engine.gradient_clipping()

    def close(found: Any, wanted: Any, what: str) -> None:
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")

    def compare(read: Any, wanted: Any, what: str) -> None:
        for name, param in engine.module.named_parameters():
            value = wanted(alone.get_parameter(name))
            value = torch.zeros(()) if value is None else local_part(param, value)
            close(read(param), value, f"{what} of {name} in step {step}")

    for step in range(steps):
        loss = engine(batch(step, rank))
        engine.backward(loss)
        each = [alone(batch(step, r)) for r in range(world)]
        (sum(each) / world).backward()
        close(loss, each[rank], f"loss of step {step}")
        compare(safe_get_full_grad, lambda param: param.grad, "gradient")
        engine.step()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), clip or float("inf"))
        close(float(engine.get_global_grad_norm()), float(norm), f"norm of step {step}")
        optimizer.step()
        optimizer.zero_grad()
        compare(safe_get_full_fp32_param, lambda param: param.detach(), "weight")
