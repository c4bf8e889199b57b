"""Forward, loss and backward over shards of sequences: the mean is over the tokens of all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.parallel.sequence.tiled.logits_training import UlyssesSPFwdLossBwdWithLogits
from tests.parallel.sequence.tiled_models import HIDDEN, VOCAB, assert_close
from tests.pool import distributed


class Causal(nn.Module):
    """A model of Transformers' kind in which tokens do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.embed, self.at = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(16, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def loss_function(self, logits: Tensor, labels: None, vocab_size: int, shift_labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), shift_labels.view(-1))

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = True) -> Any:
        return SimpleNamespace(logits=self.head(torch.tanh(self.embed(input_ids) + self.at(position_ids))))


def rows(rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCAB, (2, 7 + rank), generator=draw)
    labels = ids.clone()
    labels[:, : 5 * rank] = -100
    return {"input_ids": ids, "labels": labels}


@distributed(world_size=2)
def test_training_over_shards_is_that_on_whole_sequences() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "sequence_parallel_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 2},
    }
    module, plain = Causal(), Causal()
    engine, *_ = deepspeed.initialize(model=module, config=config)
    helper = UlyssesSPFwdLossBwdWithLogits(engine, module, torch.device("cpu"), num_loss_logit_shards=3)
    losses = []
    engine.set_gradient_accumulation_boundary(False)
    loss = helper.sp_fwd_loss_bwd(rows(dist.get_rank()))
    for rank in range(2):
        ids, labels = rows(rank).values()
        labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        at = torch.arange(ids.shape[1]).expand(ids.shape)
        expected = plain.loss_function(plain(ids, at).logits, None, VOCAB, labels)
        (expected / 2).backward()
        losses.append(expected.detach())
    engine.set_gradient_accumulation_boundary(True)
    engine.allreduce_gradients()
    found = {
        name: deepspeed.utils.safe_get_full_grad(param) for name, param in engine.module.named_parameters()
    }
    assert_close({"loss": loss}, {"loss": torch.stack(losses).mean()})
    assert_close(found, {name: param.grad for name, param in plain.named_parameters()})
    engine.destroy()
