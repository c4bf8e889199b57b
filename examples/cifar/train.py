r"""Pictures of CIFAR-10's shape and ten classes, with monitors, and with or without a mixture of experts.

    deepspeed --num_gpus 2 train.py --output out/cifar
    deepspeed --num_gpus 2 train.py --moe --num-experts 2 --ep-world-size 2 --mlp-type residual
    deepspeed --num_gpus 2 train.py --data ../cifar-10-batches-py --epochs 10

Without `--data` the pictures are made here: stripes of ten directions under noise. With it they are read from the files
`data_batch_1` to `data_batch_5` and `test_batch` of the original set. The monitors write CSV files in `--output`.
"""

from __future__ import annotations

import argparse
import math
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import deepspeed
import deepspeed.comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

CLASSES, SIDE = 10, 32


def made(count: int, seed: int) -> TensorDataset:
    """Pictures [count, 3, 32, 32] and their classes, which are the directions of the stripes."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angles = (classes * math.pi / CLASSES)[:, None, None]
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    phases = torch.rand(count, 1, 1, generator=generator) * 2 * math.pi
    stripes = torch.sin((x * angles.cos() + y * angles.sin()) * 0.8 + phases)
    colors = 0.5 + torch.rand(count, 3, 1, 1, generator=generator) / 2
    noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return TensorDataset(stripes[:, None] * colors + 0.2 * noise, classes)


def read(folder: Path, names: Sequence[str]) -> TensorDataset:
    """Pictures in -1 .. 1 and their classes, from pickled files of the original layout."""
    pictures, classes = [], []
    for name in names:
        with open(folder / name, "rb") as file:
            batch = pickle.load(file, encoding="bytes")
        pictures.append(torch.as_tensor(batch[b"data"]).view(-1, 3, SIDE, SIDE).float() / 127.5 - 1)
        classes.append(torch.as_tensor(batch[b"labels"]))
    return TensorDataset(torch.cat(pictures), torch.cat(classes))


def load(options: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    if options.data is None:
        return made(options.pictures, 0), made(1000, 1)
    return read(options.data, [f"data_batch_{part}" for part in range(1, 6)]), read(
        options.data, ["test_batch"]
    )


class Net(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(32 * 5 * 5, 84), nn.ReLU(),
        )  # fmt: skip
        self.moe = options.moe
        expert = nn.Linear(84, 84)
        self.hidden: nn.Module = expert
        if options.moe:
            self.hidden = MoE(
                hidden_size=84,
                expert=expert,
                num_experts=options.num_experts,
                ep_size=options.ep_world_size,
                use_residual=options.mlp_type == "residual",
                k=options.top_k,
                min_capacity=options.min_capacity,
                noisy_gate_policy=options.noisy_gate_policy,
            )
        self.head = nn.Linear(84, CLASSES)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [batch, 10] and the balancing loss of the experts."""
        x = self.features(pictures)
        balance = x.new_zeros(())
        if self.moe:
            x, balance, _ = self.hidden(x)
        else:
            x = self.hidden(x)
        return self.head(F.relu(x)), balance


def settings(options: argparse.Namespace) -> dict:
    monitors = {"enabled": True, "output_path": str(options.output), "job_name": "cifar"}
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "steps_per_print": 100,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.8, 0.999], "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 20}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
        "csv_monitor": monitors,
        "tensorboard": monitors | {"enabled": options.tensorboard},
        **({} if options.dtype == "fp32" else {options.dtype: {"enabled": True}}),
    }


def accuracy(engine: deepspeed.DeepSpeedEngine, data: TensorDataset) -> float:
    """Share of the pictures that this engine knows. Every rank looks at all of them."""
    engine.eval()
    right = 0
    with torch.no_grad():
        for pictures, classes in torch.utils.data.DataLoader(data, batch_size=250):
            scores, _ = engine(pictures.to(engine.device))
            right += int((scores.argmax(1).cpu() == classes).sum())
    engine.train()
    return right / len(data)


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Returns the accuracy on new pictures, before and after."""
    options = parse_arguments(argv)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    data, test = load(options)
    torch.manual_seed(0)
    net = Net(options)
    groups: list = [{"params": list(net.parameters()), "name": "all"}]
    if options.moe:  # experts and the rest in groups of their own
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=groups, config=settings(options), training_data=data
    )
    before = accuracy(engine, test)
    for epoch in range(options.epochs):
        for pictures, classes in loader:
            scores, balance = engine(pictures.to(engine.device))
            loss = F.cross_entropy(scores, classes.to(engine.device)) + options.balance * balance
            engine.backward(loss)
            engine.step()
        known = accuracy(engine, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {known:.1%} of the new pictures")
    engine.save_checkpoint(options.output / "checkpoints")
    after = accuracy(engine, test)
    dist.barrier()
    return before, after


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of the original set, `cifar-10-batches-py`")
    add("--pictures", type=int, default=8000, help="how many are made without --data")
    add("--epochs", type=int, default=4)
    add("--batch", type=int, default=32, help="pictures per rank")
    add("--stage", type=int, default=1, choices=range(4))
    add("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    add("--tensorboard", action="store_true", help="write its files, too")
    add("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_cifar"))
    add("--moe", action="store_true", help="experts instead of the hidden layer")
    add("--num-experts", type=int, default=2)
    add("--ep-world-size", type=int, default=1, help="ranks that share the experts")
    add("--mlp-type", choices=["standard", "residual"], default="standard", help="residual: PR-MoE")
    add("--top-k", type=int, default=1, choices=[1, 2])
    add("--min-capacity", type=int, default=0)
    add("--noisy-gate-policy", choices=["RSample", "Jitter"])
    add("--balance", type=float, default=0.01, help="weight of the balancing loss")
    add("--local_rank", type=int, default=-1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
