"""Lightning's Trainer on one CUDA GPU: its own loop on the device against `DeepSpeedStrategy` over ours.

NOT YET RUN: written where there was no GPU. `tests/clients/test_lightning.py` runs the same flow with an accelerator
whose devices are CPUs.

    python benchmarks/gpu/lightning_strategy.py --save h200

Shows for stages 1 to 3, offload of the optimizer and of the parameters included: seconds per step beside Lightning's
own single-device strategy, the device's peak, the last loss, and whether a run that was resumed half-way from its
checkpoint ends with the very same loss. Needs lightning (the extra `clients`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import deepspeed
import gpt
from report import Report, common_arguments

STRATEGIES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": True},
    "stage 3, all on the host": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}
ALONE = "Lightning alone"
EPOCHS = 2


class LitGPT(lightning.LightningModule):
    """The benchmarks' GPT with the same weights everywhere, also where Lightning builds it under ``zero.Init``."""

    def __init__(self, size: str, context: int) -> None:
        super().__init__()
        self.size, self.context = size, context
        self.start = gpt.build(size, context).state_dict()
        self.model: gpt.GPT | None = None
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = gpt.build(self.size, self.context)
            # What a constructor draws into weights that are partitioned already is lost: they are written whole.
            with (
                deepspeed.zero.GatheredParameters(list(self.model.parameters()), modifier_rank=0),
                torch.no_grad(),
            ):
                for name, param in self.model.named_parameters():
                    param.copy_(self.start[name])

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        assert self.model is not None
        loss = self.model(*batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


class Clock(Callback):
    """Seconds per step after the first few."""

    WARMUP = 3

    def __init__(self) -> None:
        self.steps, self.begin, self.seconds = 0, 0.0, 0.0

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        if self.steps == self.WARMUP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.begin = time.perf_counter()
        self.steps += 1

    def on_train_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - self.begin) / max(1, self.steps - self.WARMUP)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments(
        "Lightning's Trainer with and without DeepSpeedStrategy on one CUDA GPU (not yet run)."
    )
    parser.add_argument("--model", default="350M", choices=list(gpt.SIZES))
    parser.add_argument("--precision", default="bf16-true", choices=["32-true", "bf16-true", "16-true"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.model, arguments.batch, arguments.context, arguments.steps = "tiny", 1, 256, 8
    return arguments


def fit(
    arguments: argparse.Namespace, strategy: Any, epochs: int = EPOCHS, resume: Path | None = None
) -> tuple[Any, LitGPT]:
    """Train up to the end of epoch ``epochs``, from the beginning or from a checkpoint."""
    module = LitGPT(arguments.model, arguments.context)
    (rows,) = gpt.random_batches(1, arguments.steps // EPOCHS * arguments.batch, arguments.context, seed=2)
    trainer = lightning.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        precision=arguments.precision,
        gradient_clip_val=1.0,
        max_epochs=epochs,
        use_distributed_sampler=False,  # which would shuffle
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock()],
    )
    trainer.fit(
        module,
        DataLoader(TensorDataset(*rows), batch_size=arguments.batch),
        ckpt_path=str(resume) if resume else None,
    )
    return trainer, module


def measure(arguments: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    options = STRATEGIES.get(name)

    def strategy() -> Any:
        return "auto" if options is None else DeepSpeedStrategy(**options)

    trainer, module = fit(arguments, strategy())
    clock = next(callback for callback in trainer.callbacks if isinstance(callback, Clock))
    found = {
        "seconds": clock.seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "losses": [loss.item() for loss in module.losses],
    }
    if options is not None:
        half, _ = fit(arguments, strategy(), 1)
        half.save_checkpoint(folder / "half")
        _, resumed = fit(arguments, strategy(), resume=folder / "half")
        whole = convert_zero_checkpoint_to_fp32_state_dict(str(folder / "half"), str(folder / "whole.pt"))
        found["resumed_equal"] = resumed.losses[-1].item() == found["losses"][-1]
        found["converted"] = sum(weight.numel() for weight in whole["state_dict"].values())
    return found


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    os.environ["DS_ACCELERATOR"] = "cuda"
    report = Report("gpu_lightning_strategy", arguments)
    rows: dict[str, dict[str, Any]] = {}
    for name in [ALONE, *arguments.strategies]:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = measure(arguments, name, Path(folder))
    report.table(
        f"{arguments.model} GPT, {arguments.precision}, {arguments.batch} x {arguments.context}, one GPU",
        [
            "",
            "ms/step",
            f"ratio to {ALONE}",
            "peak GiB",
            "last loss",
            "resumed run equal",
            "parameters converted",
        ],
        [
            [
                name,
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['seconds'] / rows[ALONE]['seconds']:.2f}",
                f"{row['peak_bytes'] / 2**30:.2f}",
                f"{row['losses'][-1]:.4f}",
                str(row.get("resumed_equal", "")),
                f"{row['converted']:,}" if "converted" in row else "",
            ]
            for name, row in rows.items()
        ],
    )
    report.data["rows"] = rows
    report.save()


if __name__ == "__main__":
    main()
