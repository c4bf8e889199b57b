"""Lightning's Trainer with `DeepSpeedStrategy`, whole: an accelerator that passes for CUDA has CPUs as its devices."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import distributed

pytest.importorskip("lightning", reason="the clients extra is not installed")

import lightning
from lightning.pytorch.accelerators.cuda import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy

import deepspeed

ROWS, BATCH = 16, 2


class CPUs(CUDAAccelerator):
    """The interface of a CUDA accelerator, implemented for CPUs, since the strategy only checks the class."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: lightning.Trainer) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


class Module(lightning.LightningModule):
    """Built where Lightning has entered `zero.Init`; the same start on every strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Sequential | None = None
        self.seen: list[float] = []
        self.start = [p.detach().clone() for p in net().parameters()]

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = net()
            params = list(self.layers.parameters())
            with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
                for param, value in zip(params, self.start, strict=True):
                    param.copy_(value)

    def loss(self, batch: list[Tensor]) -> Tensor:
        assert self.layers is not None
        return self.layers(batch[0]).float().square().mean()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows() -> torch.utils.data.DataLoader:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=BATCH)


def fit(
    folder: Path,
    options: dict[str, Any],
    *,
    precision: str = "32-true",
    epochs: int = 2,
    resume: Path | None = None,
) -> tuple[Any, Module]:
    module = Module()
    # What it reads to find out that the processes are there already; everything else comes from the pool.
    assert "LOCAL_RANK" in os.environ
    trainer = lightning.Trainer(
        accelerator=CPUs(),
        devices=torch.distributed.get_world_size(),
        strategy=DeepSpeedStrategy(process_group_backend="gloo", logging_batch_size_per_gpu=BATCH, **options),
        precision=precision,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    before = dict(os.environ)
    try:
        trainer.fit(module, rows(), rows(), ckpt_path=str(resume) if resume else None)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return trainer, module


def plain() -> list[float]:
    """The same steps in plain torch; all ranks see the same rows here."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for (x,) in rows():
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


STRATEGIES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2, optimizer on the host": {"stage": 2, "offload_optimizer": True},
    "3, all on the host": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


@pytest.mark.parametrize("name", STRATEGIES)
@distributed(world_size=2)
def test_fit_equals_a_plain_loop_and_resumes(tmp_path: Path, name: str) -> None:
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    trainer, module = fit(tmp_path, STRATEGIES[name])
    assert module.seen == pytest.approx(plain(), rel=1e-5)
    assert trainer.callback_metrics["validation"] < module.seen[0]
    half, _ = fit(tmp_path, STRATEGIES[name], epochs=1)
    half.save_checkpoint(tmp_path / "half")
    _, resumed = fit(tmp_path, STRATEGIES[name], resume=tmp_path / "half")
    assert resumed.seen == module.seen[ROWS // BATCH :]
    if torch.distributed.get_rank() == 0:
        whole = convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "half"), str(tmp_path / "whole.pt"))
        assert set(whole["state_dict"]) == {f"layers.{name}" for name in net().state_dict()}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "16-true"])
@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_precisions(tmp_path: Path, stage: int, precision: str) -> None:
    config = {"initial_scale_power": 8} if precision.startswith("16") else {}
    _, module = fit(tmp_path, {"stage": stage, **config}, precision=precision)
    assert all(loss == loss for loss in module.seen)
    assert sum(module.seen[8:]) < sum(module.seen[:8])


@distributed(world_size=1)
def test_monitors_of_a_config_and_silence_otherwise(tmp_path: Path) -> None:
    """Lightning shows its own bar, so the engine shows nothing; its curves are those of the config."""
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "curves"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        _, module = fit(
            tmp_path, {"config": {"zero_optimization": {"stage": 2}, "csv_monitor": section}}, epochs=1
        )
    with open(tmp_path / "curves" / "Train_Samples_train_loss.csv", newline="") as file:
        _, *found = csv.reader(file)
    assert [float(loss) for _, loss in found] == pytest.approx(module.seen, rel=1e-5)
    assert "step=" not in printed.getvalue() and "DeepSpeed info" not in printed.getvalue()
