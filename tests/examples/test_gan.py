"""The example of two engines: it trains as plain torch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.examples.scripts import script
from tests.pool import distributed


def plain(steps: int) -> float:
    """The same training on one rank without engines: the distance after it."""
    gan = script("gan")
    torch.manual_seed(0)
    discriminator, generator = gan.make_discriminator(), gan.make_generator()
    optimizers = [
        torch.optim.AdamW(each.parameters(), 5e-4, (0.5, 0.999), weight_decay=0)
        for each in (discriminator, generator)
    ]
    noise = torch.Generator().manual_seed(1)
    fixed = torch.randn(64, gan.NOISE, generator=torch.Generator().manual_seed(0))
    real = torch.stack([gan.Rings()[index] for index in range(32)])
    for _ in range(steps):
        drawn = generator(torch.randn(len(real), gan.NOISE, generator=noise))
        optimizers[0].zero_grad()
        (gan.judged(discriminator(real), 0.9) + gan.judged(discriminator(drawn.detach()), 0.0)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        gan.judged(discriminator(drawn), 1.0).backward()
        optimizers[1].step()
    return gan.shown(generator, fixed)


@distributed(world_size=1)
@pytest.mark.parametrize("stage", [0, 3])
def test_engines_train_as_torch_does(tmp_path: Path, stage: int) -> None:
    gan = script("gan")
    gan.Rings.__len__ = lambda self: 32  # one batch, in every step
    before, after = gan.main(["--steps", "3", "--stage", str(stage), "--output", str(tmp_path)])
    assert after != before
    assert after == pytest.approx(
        plain(3), abs=2e-4
    )  # 9e-4 where the discriminator keeps the generator's gradients
    assert (tmp_path / "generator/latest").exists() and (tmp_path / "discriminator/latest").exists()


@distributed(world_size=1)
def test_engines_train_in_sixteen_bits(tmp_path: Path) -> None:
    gan = script("gan")
    gan.Rings.__len__ = lambda self: 32
    options = ["--steps", "3", "--stage", "2", "--precision", "bf16", "--output", str(tmp_path)]
    assert gan.main(options)[1] == pytest.approx(plain(3), abs=0.05)
