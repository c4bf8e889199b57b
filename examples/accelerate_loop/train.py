"""A plain training loop with Accelerate: prepare, backward, save_state, load_state.

    python examples/accelerate_loop/train.py
    torchrun --nproc-per-node 2 examples/accelerate_loop/train.py             # two ranks, or:
    deepspeed --num_gpus 2 examples/accelerate_loop/train.py

A two-layer encoder learns to tell which of two symbols is more frequent in a sequence. Shows that the loop does not
change with the ZeRO stage: the losses of stages 0 to 3 are printed side by side, and after `load_state` a stage
continues with exactly the numbers it had.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 17


class Majority(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 2)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.head(self.encode(self.embed(symbols)).mean(1))


def data() -> TensorDataset:
    symbols = torch.randint(0, 2, (1024, LENGTH), generator=torch.Generator().manual_seed(0))
    return TensorDataset(symbols, (symbols.sum(1) > LENGTH // 2).long())


def start() -> None:
    """Without a launcher, be the only rank; without a GPU, tell Accelerate the backend."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29512",
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if not torch.cuda.is_available():
        PartialState(backend="gloo")


def train(stage: int, folder: Path) -> tuple[list[float], bool]:
    """The losses of two passes, and whether repeating the second one from the saved state gives equal numbers."""
    AcceleratorState._reset_state()  # a different plugin from the one before, in the same process
    torch.manual_seed(0)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0))
    model = Majority()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=32))

    def one_pass() -> list[float]:
        losses = []
        for symbols, labels in loader:
            loss = nn.functional.cross_entropy(model(symbols).float(), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        return losses

    first = one_pass()
    accelerator.save_state(str(folder / f"stage{stage}"))
    second = one_pass()
    accelerator.load_state(str(folder / f"stage{stage}"))
    same = one_pass() == second
    accelerator.free_memory()
    return first + second, same


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_accelerate_loop"))
    options = parser.parse_args()
    start()
    for stage in options.stages:
        losses, same = train(stage, options.output)
        if PartialState().is_main_process:
            print(
                f"stage {stage}: loss {losses[0]:.4f} -> {losses[-1]:.4f}; from the saved state: equal = {same}"
            )


if __name__ == "__main__":
    main()
