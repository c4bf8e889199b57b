r"""A GAN: two engines that train in turns, each with its own config, optimizer, loss scale and checkpoints.

    python train.py
    deepspeed --num_gpus 2 train.py --stage 2 --precision bf16 --steps 2000

The generator learns to draw rings of two radii; the discriminator tells its drawings (16 x 16) from real ones.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.dataloader import RepeatingLoader

SIDE, NOISE = 16, 16
RADII = (3.0, 6.0)


class Rings(torch.utils.data.Dataset):
    """Drawings [1, 16, 16] in -1 .. 1 of rings around nearly the middle."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        middle = torch.randn(2, generator=torch.Generator().manual_seed(index)) * 0.5 + (SIDE - 1) / 2
        axis = torch.arange(SIDE)
        distance = ((axis[:, None] - middle[0]) ** 2 + (axis - middle[1]) ** 2).sqrt()
        return (2 * torch.exp(-((distance - RADII[index % 2]) ** 2)) - 1)[None]


def make_generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 64 * 4 * 4), nn.Unflatten(1, (64, 4, 4)), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip


def make_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 1),
    )  # fmt: skip


def settings(options: argparse.Namespace) -> dict:
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "optimizer": {"type": "Adam", "params": {"lr": 5e-4, "betas": [0.5, 0.999]}},
        "zero_optimization": {"stage": options.stage},
        **({} if options.precision == "fp32" else {options.precision: {"enabled": True}}),
    }


def judged(logits: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        logits.float(), torch.full_like(logits, real, dtype=torch.float32)
    )


def quality(drawings: Tensor) -> float:
    """Mean square distance of a drawing from the nearest of 256 real ones."""
    real = torch.stack([Rings()[each] for each in range(256)]).flatten(1)
    return torch.cdist(drawings.float().cpu().flatten(1), real).square().min(1).values.mean().item() / SIDE**2


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Returns the drawings' distance from real ones, before and after."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=1, choices=range(4))
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32, help="drawings per rank")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_gan"))
    parser.add_argument("--local_rank", type=int, default=-1)
    options = parser.parse_args(argv)
    deepspeed.init_distributed(auto_mpi_discovery=False)

    torch.manual_seed(0)
    discriminator, _, loader, _ = deepspeed.initialize(
        model=make_discriminator(), config=settings(options), training_data=Rings()
    )
    generator, *_ = deepspeed.initialize(model=make_generator(), config=settings(options))
    noise = torch.Generator().manual_seed(1 + dist.get_rank())  # another one on each rank
    device = generator.device
    fixed = torch.randn(64, NOISE, generator=torch.Generator().manual_seed(0)).to(device)
    before = shown(generator, fixed)
    real_drawings = iter(RepeatingLoader(loader))
    for step in range(1, options.steps + 1):
        real = next(real_drawings).to(device)
        drawn = generator(torch.randn(len(real), NOISE, generator=noise).to(device))

        # The discriminator's turn: two backwards, one update. `detach`: its loss does not reach the generator.
        discriminator.zero_grad()  # what the generator's last turn left there
        loss_real = judged(discriminator(real), 0.9)
        discriminator.backward(loss_real)
        loss_drawn = judged(discriminator(drawn.detach()), 0.0)
        discriminator.backward(loss_drawn)
        discriminator.step()

        # The generator's turn: its loss passes through the discriminator.
        generator.zero_grad()
        loss_g = judged(discriminator(drawn), 1.0)
        generator.backward(loss_g)
        generator.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}: discriminator {loss_real + loss_drawn:.3f}, generator {loss_g:.3f}")

    after = shown(generator, fixed)
    for name, engine in (("generator", generator), ("discriminator", discriminator)):
        engine.save_checkpoint(options.output / name)
    if dist.get_rank() == 0:
        print(f"distance from the nearest real drawing {before:.4f} -> {after:.4f}")
    dist.barrier()
    return before, after


def shown(generator: deepspeed.DeepSpeedEngine, noise: Tensor) -> float:
    generator.eval()
    with torch.no_grad():
        result = quality(generator(noise))
    generator.train()
    return result


if __name__ == "__main__":
    main()
