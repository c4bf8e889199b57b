"""A recipe of docs/recipes in its short form: the config of its page, trained on a tiny model.

    python examples/recipes/twin.py cpu_only
    deepspeed --num_gpus 2 examples/recipes/twin.py finetune_8b

What the recipe is about (stage, offload, adapters, experts, quantized gathers) stays as it is; batches and groups of
ranks become small enough for two ranks of a laptop. `adapted_8b` and `mixture_8x7b` are the models that two of the
pages plan.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.planning.step_time.shapes import build_shape
from deepspeed.tools.starter.choices import add_adapters

PAGES = Path(__file__).resolve().parents[2] / "docs" / "recipes"
LLAMA_8B = "gpt:32x4096x32x128256x14336x8"
TINY = "gpt:2x32x2x64"
SEQUENCE = 16
RECIPES = (
    "finetune_8b",
    "lora_8b",
    "full_70b",
    "pretrain_64",
    "mixture_of_experts",
    "slow_network",
    "cpu_only",
)


class SparseMLP(nn.Module):
    """A mixture of the experts that ``mlp`` is the first of, two for each token; keeps the balancing loss."""

    def __init__(self, width: int, mlp: nn.Module, experts: int, ranks: int) -> None:
        super().__init__()
        self.moe = MoE(width, mlp, num_experts=experts, ep_size=ranks, k=2)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y, self.balance, _ = self.moe(x)
        return y


class Mixture(nn.Module):
    """A GPT of the given shape with ``experts`` for each MLP, spread over ``ranks``."""

    def __init__(self, shape: str, experts: int, ranks: int) -> None:
        super().__init__()
        self.gpt = build_shape(shape)
        self.config = self.gpt.config
        for block in self.gpt.blocks:
            block.mlp = SparseMLP(self.config.hidden_size, block.mlp, experts, ranks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(tokens, targets)
        return loss + 0.01 * sum(block.mlp.balance for block in self.gpt.blocks)


def mixture_8x7b() -> nn.Module:
    """The shape of Mixtral 8x7B, with one expert of each layer on each of 8 ranks."""
    return Mixture("gpt:32x4096x32x32000x14336x8", experts=8, ranks=8).bfloat16()


def adapted_8b() -> nn.Module:
    """The shape of an 8B Llama, frozen, with the adapters that are trained."""
    model = build_shape(LLAMA_8B).bfloat16()
    add_adapters(model)
    return model


class Adapted(nn.Module):
    """A frozen linear layer and the two matrices that LoRA trains beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def make_twin(recipe: str, ranks: int) -> nn.Module:
    """The tiny model that stands for the recipe's."""
    torch.manual_seed(0)
    if recipe == "mixture_of_experts":
        return Mixture(TINY, experts=4, ranks=ranks)
    model = build_shape(TINY)
    if recipe == "lora_8b":
        model.requires_grad_(False)
        for block in model.blocks:
            for part in (block.attention, block.mlp):
                for name, linear in [
                    each for each in part.named_children() if isinstance(each[1], nn.Linear)
                ]:
                    setattr(part, name, Adapted(linear))
    return model


def config_of(recipe: str, ranks: int) -> dict:
    """The config of the recipe's page, with batches of one sample, and groups of at most all ranks."""
    page = (PAGES / f"{recipe}.md").read_text(encoding="utf-8")
    blocks = re.findall(r'```json title="ds_config.json"\n(.*?)```', page, flags=re.S)
    config = json.loads(blocks[0])
    config.pop("train_batch_size", None)
    config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = min(2, config.get("gradient_accumulation_steps", 1))
    config["optimizer"]["params"]["lr"] = 1e-2
    zero = config["zero_optimization"]
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = min(ranks, zero["zero_hpz_partition_size"])
    return config


def train(recipe: str, steps: int) -> list[float]:
    """The mean loss of each step on a batch that is always the same."""
    deepspeed.init_distributed(auto_mpi_discovery=False)
    ranks = deepspeed.comm.get_world_size()
    config = config_of(recipe, ranks)
    engine, *_ = deepspeed.initialize(model=make_twin(recipe, ranks), config=config)
    tokens = torch.arange(SEQUENCE, device=engine.device)[None] + engine.global_rank
    losses = []
    while engine.global_steps < steps:
        loss = engine(tokens, tokens + 1)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=0)  # the deepspeed command may pass it
    options = parser.parse_args()
    losses = train(options.recipe, options.steps)
    if deepspeed.comm.get_rank() == 0:
        print(f"{options.recipe}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps")


if __name__ == "__main__":
    main()
