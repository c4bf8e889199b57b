"""Makes the fixtures in tests/files/upstream_moe_checkpoints with DeepSpeed 0.19.8.

Not part of the suite. Needs a Python in which that release is installed:

    python tests/parallel/expert/make_upstream_checkpoints.py PYTHON_WITH_0_19

Trains a small model with experts on 2 ranks, saves a checkpoint, trains one more step, and keeps the weights of every
rank from before and after that step in ``expected.pt``: loading the checkpoint and taking the same step must give the
latter.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests/files/upstream_moe_checkpoints"
CASES = {"stage0_ep2": (0, 2), "stage2_ep2": (2, 2), "stage1_ep1": (1, 1)}
HIDDEN, TOKENS, EXPERTS = 6, 11, 4


def model(ep_size: int) -> Any:
    import torch
    from torch import nn

    from deepspeed.parallel.expert.layer import MoE

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(TOKENS, HIDDEN)
            expert = nn.Sequential(nn.Linear(HIDDEN, 5), nn.Tanh(), nn.Linear(5, HIDDEN))
            settings = {"k": 1, "use_rts": False, "capacity_factor": 4.0, "min_capacity": 20}
            self.layers = nn.ModuleList(
                [MoE(HIDDEN, expert, count, ep_size, **settings) for count in (EXPERTS, 2)]
            )
            self.norm = nn.LayerNorm(HIDDEN)
            self.head = nn.Linear(HIDDEN, TOKENS)

        def forward(self, tokens: Any) -> Any:
            hidden, total = self.emb(tokens), torch.zeros(())
            for layer in self.layers:
                output, l_aux, _ = layer(hidden)
                hidden, total = hidden + output, total + l_aux
            return self.head(self.norm(hidden)), total

    return Net()


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
    }


def loss_of(engine: Any, step: int, rank: int) -> Any:
    import torch
    from torch.nn.functional import cross_entropy

    tokens = torch.randint(0, TOKENS, (2, 4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    logits, l_aux = engine(tokens[0])
    return cross_entropy(logits.float().flatten(0, 1), tokens[1].flatten()) + 0.01 * l_aux


def weights_of(net: Any, share: int) -> dict[str, Any]:
    """With experts under their numbers in the whole layer."""
    found = {}
    for name, param in net.named_parameters():
        layer, _, rest = name.partition(".deepspeed_experts.")
        if rest:
            number, _, rest = rest.partition(".")
            local = net.get_submodule(layer).num_local_experts
            name = f"{layer}.deepspeed_experts.{share * local + int(number)}.{rest}"
        found[name] = param.detach().clone()
    return found


def on_a_rank(folder: str, stage: int, ep_size: int) -> None:
    import torch

    import deepspeed
    from deepspeed.parallel.expert.utils import split_params_into_different_moe_groups_for_optimizer

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = model(ep_size)
    rank = torch.distributed.get_rank()
    torch.manual_seed(1 + rank % ep_size)
    with torch.no_grad():
        for name, param in net.named_parameters():
            if "deepspeed_experts" in name:
                param.copy_(torch.randn_like(param) / 2)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(net.parameters()), "name": "all"}
    )
    engine = deepspeed.initialize(model=net, model_parameters=groups, config=config(stage))[0]
    for step in range(3):
        engine.backward(loss_of(engine, step, rank))
        engine.step()
    engine.save_checkpoint(folder)
    before = weights_of(net, rank % ep_size)
    engine.backward(loss_of(engine, 3, rank))
    engine.step()
    torch.save({"before": before, "after": weights_of(net, rank % ep_size)}, f"{folder}/rank{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # that release's threads now and then abort at exit


def make(python: str) -> None:
    import torch

    sys.path.insert(0, str(ROOT))
    from tests.checkpoint.make_upstream_checkpoints import launch

    for name, (stage, ep_size) in CASES.items():
        folder = FIXTURES / name
        if (folder / "latest").exists():
            continue  # remove the folder to make it again
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch(python, 2, str(folder), str(stage), str(ep_size), script=__file__)
        expected: dict[str, Any] = {"before": {}, "after": {}}
        for path in sorted(folder.glob("rank*.pt")):
            for when, weights in torch.load(path).items():
                expected[when].update(weights)
            path.unlink()
        torch.save(expected, folder / "expected.pt")
        for path in folder.glob("*.py"):
            path.unlink()
        print(folder.name, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()), "bytes")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        on_a_rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        make(sys.argv[1])
