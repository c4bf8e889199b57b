r"""A curriculum by a metric: analyze the data once, then train on common text first and on all of it later.

    python examples/data_efficiency/by_metric.py
    python examples/data_efficiency/by_metric.py --workers 4 --steps 600

The metric is the rarity of a window of tokens: the mean of -log of each token's frequency. `DataAnalyzer` computes it
in --workers parts (map), which may run on as many hosts, and joins them to index files (reduce). The config then names
these files. Model and text are those of examples/pretrain_gpt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "pretrain_gpt"))

from data import VOCABULARY, load, make  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

import deepspeed  # noqa: E402
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer  # noqa: E402


class Windows(torch.utils.data.Dataset):
    """Windows of ``context`` tokens and the one behind, int64."""

    def __init__(self, tokens: np.ndarray, context: int, most: int) -> None:
        count = min((len(tokens) - 1) // context, most)
        places = np.arange(count)[:, None] * context + np.arange(context + 1)
        self.rows = torch.from_numpy(tokens[places].astype(np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Rarity:
    """Of each window [batch, context] -> int64 [batch], in thousandths of a nat per token."""

    def __init__(self, windows: Windows) -> None:
        counts = torch.bincount(windows.rows.flatten(), minlength=VOCABULARY).clamp(min=1)
        self.surprise = -(counts / counts.sum()).log()

    def __call__(self, batch: Tensor) -> Tensor:
        return (1000 * self.surprise[batch].mean(dim=1)).long()


def analyze(windows: Windows, rarity: Rarity, folder: Path, workers: int) -> None:
    """Write the index files to ``folder``."""

    def part(worker: int) -> DataAnalyzer:
        return DataAnalyzer(
            windows,
            num_workers=workers,
            worker_id=worker,
            batch_size=256,
            save_path=str(folder),
            metric_names=["rarity"],
            metric_functions=[rarity],
            metric_types=["single_value_per_sample"],
            metric_dtypes=[torch.int64],
        )

    for worker in range(workers):  # on several hosts, each does one of these
        part(worker).run_map()
    part(0).run_reduce()


def settings(options: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """With ``folder``, of the index files: from the most common fifth of the windows to all of them."""
    config: dict[str, Any] = {
        "train_batch_size": options.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "betas": [0.9, 0.95]}},
    }
    if folder is not None:
        metric = {
            "index_to_sample_path": str(folder / "rarity/rarity_index_to_sample_percentile_merged"),
            "index_to_metric_path": str(folder / "rarity/rarity_index_to_metric"),
            "difficulty_type": "percentile",
            "clustering_type": "schedule_based",
            "min_difficulty": 20,
            "max_difficulty": 100,
            "schedule_type": "fixed_root",
            "schedule_config": {
                "total_curriculum_step": options.steps // 2,
                "difficulty_step": 5,
                "root_degree": 2,
            },
        }
        config["data_efficiency"] = {
            "enabled": True,
            "seed": 0,
            "data_sampling": {
                "enabled": True,
                "num_epochs": 100,
                "curriculum_learning": {
                    "enabled": True,
                    "data_cluster_path": str(folder / "clusters"),
                    "curriculum_metrics": {"rarity": metric},
                },
            },
        }
    return config


def train(options: argparse.Namespace, config: dict[str, Any], data: Windows, held_out: Tensor) -> Any:
    """The batches [steps, batch, context + 1] and the loss on ``held_out`` at the end."""
    torch.manual_seed(0)
    sizes = GPTConfig(
        context=options.context, layers=options.layers, heads=options.heads, width=options.width
    )
    engine, _, loader, _ = deepspeed.initialize(model=GPT(sizes), config=config, training_data=data)
    batches: list[Tensor] = []
    while len(batches) < options.steps:
        for rows in loader:
            batches.append(rows)
            rows = rows.to(engine.device)
            engine.backward(engine(rows[:, :-1], rows[:, 1:]))
            engine.step()
            if len(batches) == options.steps:
                break
    engine.eval()
    with torch.no_grad():
        rows = held_out.to(engine.device)
        loss = engine(rows[:, :-1], rows[:, 1:]).item()
    engine.destroy()
    return torch.stack(batches), loss


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], float]]:
    """For each run, the mean rarity of the batches in each fifth of the steps, and the loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument("--workers", type=int, default=2, help="parts of the analysis")
    parser.add_argument("--windows", type=int, default=20_000, help="of the training text, at most")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument(
        "--text", type=Path, default=HERE.parent / "pretrain_gpt/out/text", help="made if missing"
    )
    options = parser.parse_args(argv)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    if not (options.text / "tokens.npz").exists():
        make(options.text)
    text = load(options.text)
    windows = Windows(text.train, options.context, options.windows)
    held_out = Windows(text.validation, options.context, 64).rows
    rarity = Rarity(windows)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        analyze(windows, rarity, Path(scratch), options.workers)
        for run, folder in (("plain", None), ("by rarity", Path(scratch))):
            batches, loss = train(options, settings(options, folder), windows, held_out)
            means = [rarity(part.flatten(0, 1)).float().mean().item() / 1000 for part in batches.chunk(5)]
            found[run] = means, loss
            shown = ", ".join(f"{each:.2f}" for each in means)
            print(f"{run}: rarity of the batches {shown}; validation loss {loss:.4f}", flush=True)
    return found


if __name__ == "__main__":
    main()
