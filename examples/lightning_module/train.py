"""A LightningModule at ZeRO stage 2.

    python examples/lightning_module/train.py

With a CUDA device, Lightning's Trainer runs it with `DeepSpeedStrategy`. That strategy refuses other devices, so on CPU
the same module, unchanged, is driven by an engine: its `configure_optimizers` provides the optimizer and its
`training_step` the loss. Shows the loss, and that Lightning's converter reads the checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import deepspeed


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).float(), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> DataLoader:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=draw)
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=16)


def on_gpu(module: Regression, epochs: int, folder: Path) -> Path:
    trainer = lightning.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=DeepSpeedStrategy(stage=2),
        precision="bf16-mixed",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "saved")
    return folder / "saved"


def on_cpu(module: Regression, epochs: int, folder: Path) -> Path:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 2}}
    deepspeed.init_distributed(auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(model=module, optimizer=module.configure_optimizers(), config=config)
    losses = []
    for _ in range(epochs):
        for index, batch in enumerate(loader()):
            loss = engine.module.training_step(batch, index)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    engine.save_checkpoint(str(folder / "saved"), tag="checkpoint")
    return folder / "saved"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_lightning_module"))
    options = parser.parse_args()
    torch.manual_seed(0)
    run = on_gpu if torch.cuda.is_available() else on_cpu
    saved = run(Regression(), options.epochs, options.output)
    whole = convert_zero_checkpoint_to_fp32_state_dict(str(saved), str(options.output / "whole.pt"))
    fresh = Regression()
    fresh.load_state_dict(whole["state_dict"])
    x, y = next(iter(loader()))
    print(f"converted to one file and loaded: loss {nn.functional.mse_loss(fresh(x), y).item():.4f}")


if __name__ == "__main__":
    main()
