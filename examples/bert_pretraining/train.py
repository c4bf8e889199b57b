r"""BERT pre-training: masked words and the next passage, first on short sequences, then on long ones.

    python train.py
    deepspeed --num_gpus 2 train.py --optimizer OneBitLamb
    python train.py --layers_of torch             # for comparison: torch's own encoder layer

The text is that of examples/pretrain_gpt. Its layers are `DeepSpeedTransformerLayer`. The second phase begins with the
weights that the first one saved, and has its own config: other lengths need another learning rate.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "pretrain_gpt"))

from bert import CLS, IGNORED, MASK, SEP, Bert  # noqa: E402
from data import VOCABULARY, Text, load, make  # noqa: E402

import deepspeed  # noqa: E402
from deepspeed import comm as dist  # noqa: E402

OPTIMIZERS = ("Lamb", "OneBitLamb", "OneBitAdam", "AdamW")


# The text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    """[sequences, length]: CLS, a passage, SEP, another passage, SEP."""
    segments: Tensor
    """[sequences, length]: 0 for the first passage, 1 for the second."""
    labels: Tensor
    """[sequences, length]: the tokens that were masked; elsewhere -100."""
    follows: Tensor
    """[sequences]: 1 where the second passage stands behind the first in the text."""


def starts_of_words(text: Text) -> Tensor:
    """For each token of the vocabulary, whether it begins a word: what continues one begins with a letter or digit."""
    spelled = [text.tokenizer.id_to_token(token) or "" for token in range(VOCABULARY)]
    return torch.tensor([not (each[:1].isascii() and each[:1].isalnum()) for each in spelled])


def draw(tokens: np.ndarray, starts: Tensor, sequences: int, length: int, seed: int) -> Batch:
    """Passages from all over ``tokens``. 15 % of the words are masked as a whole: 8 of 10 tokens become MASK, one a
    random token, one stays."""
    random = torch.Generator().manual_seed(seed)
    half = (length - 3) // 2
    first = torch.randint(len(tokens) - 2 * half, (sequences,), generator=random)
    elsewhere = torch.randint(len(tokens) - half, (sequences,), generator=random)
    follows = torch.randint(2, (sequences,), generator=random)
    second = torch.where(follows == 1, first + half, elsewhere)

    def passage(begin: Tensor) -> Tensor:
        return torch.from_numpy(tokens[begin[:, None].numpy() + np.arange(half)].astype(np.int64))

    def column(token: int) -> Tensor:
        return torch.full((sequences, 1), token)

    ids = torch.cat([column(CLS), passage(first), column(SEP), passage(second), column(SEP)], dim=1)
    segments = (torch.arange(ids.shape[1]) >= half + 2).long().expand_as(ids)
    special = ids >= VOCABULARY
    words = (special | starts[ids.clamp(max=VOCABULARY - 1)]).cumsum(dim=1)
    chosen = torch.rand(ids.shape, generator=random).gather(1, words.clamp(max=ids.shape[1] - 1)) < 0.15
    chosen &= ~special
    fate = torch.rand(ids.shape, generator=random)
    masked = ids.masked_fill(chosen & (fate < 0.8), MASK)
    noise = torch.randint(VOCABULARY, ids.shape, generator=random)
    masked = torch.where(chosen & (fate >= 0.9), noise, masked)
    return Batch(masked, segments, ids.masked_fill(~chosen, IGNORED), follows)


# Training ---------------------------------------------------------------------------------------------------


def settings(options: argparse.Namespace, length: int) -> dict[str, Any]:
    """As many tokens in each step of both phases, so the longer sequences are fewer, and learn with a lower rate."""
    rate = options.lr * (1.0 if length == options.lengths[0] else 0.5)
    params: dict[str, Any] = {"lr": rate, "weight_decay": 0.01}
    if options.optimizer.startswith("OneBit"):
        params["freeze_step"] = max(options.steps // 4, 1)
    if options.optimizer.endswith("Lamb"):
        params |= {"max_coeff": 0.5, "min_coeff": 0.01}
    ramp = {"warmup_max_lr": rate, "warmup_num_steps": max(options.steps // 10, 2)}
    return {
        "train_batch_size": max(options.tokens // length, 1) * dist.get_world_size(),
        "gradient_clipping": 1.0,
        "optimizer": {"type": options.optimizer, "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": {**ramp, "total_num_steps": options.steps + 1}},
    }


def evaluate(engine: Any, text: Text, starts: Tensor, length: int) -> list[float]:
    """Loss of the masked words and of the order on text that training never sees."""
    engine.eval()
    with torch.no_grad():
        losses = [
            engine(*on_device(engine, draw(text.validation, starts, 16, length, 10**6 + part)))[1]
            for part in range(4)
        ]
    engine.train()
    return torch.stack(losses).mean(dim=0).tolist()


def on_device(engine: Any, batch: Batch) -> list[Tensor]:
    return [each.to(engine.device) for each in (batch.ids, batch.segments, batch.labels, batch.follows)]


def phase(
    options: argparse.Namespace, text: Text, starts: Tensor, length: int, folder: Path
) -> list[list[float]]:
    """Train on ``length`` tokens, from the weights in ``folder`` if there are any. Return the losses before
    and after."""
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=Bert(options), config=settings(options, length))
    if (folder / "latest").exists():
        engine.load_checkpoint(str(folder), load_module_only=True)
    losses = [evaluate(engine, text, starts, length)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(options.steps):
        size = engine.train_micro_batch_size_per_gpu()
        batch = draw(text.train, starts, size, length, step * ranks + rank)
        engine.backward(engine(*on_device(engine, batch))[0])
        engine.step()
    losses.append(evaluate(engine, text, starts, length))
    engine.save_checkpoint(str(folder), tag=f"length_{length}")
    engine.destroy()
    return losses


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", default="Lamb", choices=OPTIMIZERS)
    parser.add_argument("--layers_of", default="deepspeed", choices=["deepspeed", "torch"])
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=[64, 256], help="of a sequence in both phases"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a step and rank")
    parser.add_argument("--steps", type=int, default=300, help="of each phase")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--text", type=Path, default=HERE.parent / "pretrain_gpt/out/text", help="made if missing"
    )
    parser.add_argument("--output", type=Path, help="folder of the checkpoints; default: one that is removed")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[list[list[float]]]:
    """The losses of each phase before and after it."""
    options = parse_arguments(argv)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    if dist.get_rank() == 0 and not (options.text / "tokens.npz").exists():
        make(options.text)
    dist.barrier()
    text = load(options.text)
    starts = starts_of_words(text)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        shared = [str(options.output or scratch)]
        dist.broadcast_object_list(shared, src=0)
        for length in options.lengths:
            found.append(phase(options, text, starts, length, Path(shared[0])))
            if dist.get_rank() == 0:
                (words, order), (words_after, order_after) = found[-1]
                print(
                    f"{options.steps} steps of {length} tokens: masked words {words:.3f} -> {words_after:.3f}, "
                    f"next passage {order:.3f} -> {order_after:.3f} (unigrams {text.unigram_entropy():.3f})",
                    flush=True,
                )
        dist.barrier()
    return found


if __name__ == "__main__":
    main()
