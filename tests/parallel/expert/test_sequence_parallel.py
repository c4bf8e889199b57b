"""Experts where ranks share sequences (Ulysses), against one process that has whole sequences and all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import deepspeed
from deepspeed.checkpoint.placement import local_part
from deepspeed.parallel.expert.layer import MoE
from deepspeed.parallel.sequence.hf import parallel_state_sp
from deepspeed.parallel.sequence.hf.loss import token_mean
from deepspeed.parallel.sequence.layer import DistributedAttention
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param, safe_get_full_grad
from tests.pool import distributed

VOCABULARY, WIDTH, HEADS, EXPERTS, BALANCE, LENGTHS = 11, 12, 3, 4, 0.05, (4, 5)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Model(nn.Module):
    """One layer. ``share``: which of the ``ep_size`` runs of the experts this rank has; all experts differ."""

    def __init__(self, group: Any, ep_size: int, share: int, k: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention = DistributedAttention(Attention(), group, 2, 1)
        expert = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        choice = {"k": k, "drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(WIDTH, expert, EXPERTS, ep_size, **choice)
        with torch.no_grad():
            gate = torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(1))
            self.moe.deepspeed_moe.gate.wg.weight.copy_(gate)  # type: ignore[union-attr]
            experts: Any = self.moe.deepspeed_moe.experts
            for index, each in enumerate(experts.deepspeed_experts, share * experts.num_local_experts):
                source = torch.Generator().manual_seed(100 + index)
                for param in each.parameters():
                    param.copy_(0.3 * torch.randn(param.shape, generator=source))

    def forward(self, ids: Tensor, positions: Tensor, parts: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Return logits and the balancing loss: the mean over ``parts`` of the sequence, each balanced separately."""
        x = self.embed(ids) + self.place(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = self.attention(q, k, v, 0).flatten(2) + x
        found = [self.moe(part)[:2] for part in x.split(parts or (x.shape[1],), 1)]
        mixed = torch.cat([output for output, _ in found], 1)
        return self.out(x + mixed), torch.stack([l_aux for _, l_aux in found]).mean()


def batch(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, sum(LENGTHS)), generator=source)
    labels[:, :2] = -100
    return {"ids": ids, "positions": torch.arange(sum(LENGTHS)).expand(2, -1), "labels": labels}


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("stage", "ep_size", "k"), [(0, 2, 2), (1, 4, 1), (2, 2, 1), (2, 1, 2), (3, 2, 2), (3, 4, 2)]
)
@distributed(world_size=4)
def test_equals_one_process(stage: int, ep_size: int, k: int) -> None:
    """Two sequences on two ranks each, which share experts with their neighbour (2) or with all (4)."""
    parallel_state_sp.initialize_sequence_parallel(2)
    group = parallel_state_sp.get_sequence_parallel_group()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = Model(group, ep_size, dist.get_rank() % ep_size, k)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=parallel_state_sp)
    plain = Model(None, 1, 0, k)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-4, weight_decay=0.0)
    row, column = divmod(dist.get_rank(), 2)

    def compare(read: Any, wanted: Any) -> None:
        for name, param in engine.module.named_parameters():
            value = local_part(param, wanted(plain.get_parameter(name)))
            torch.testing.assert_close(
                read(param), value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"step {step}, {n}: {m}"
            )

    for step in range(3):
        both = [batch(2 * step + replica) for replica in range(2)]
        expected = []
        for one in both:
            logits, l_aux = plain(one["ids"], one["positions"], LENGTHS)
            expected.append(mean_loss(logits, one["labels"]))
            ((expected[-1] + BALANCE * l_aux) / 2).backward()
        own = {key: value.split(LENGTHS, 1)[column] for key, value in both[row].items()}
        logits, l_aux = engine(own["ids"], own["positions"])
        loss = token_mean(mean_loss(logits, own["labels"]), (own["labels"] != -100).sum(), group)
        assert loss.item() == pytest.approx(expected[row].item(), rel=1e-5)
        engine.backward(loss + BALANCE * l_aux)
        compare(safe_get_full_grad, lambda param: param.grad)
        engine.step()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        compare(safe_get_full_fp32_param, lambda param: param.detach())
    engine.destroy()
