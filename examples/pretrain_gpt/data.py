"""Text for the demo: the source of Python's own standard library, as tokens of a byte-level BPE trained on
it.

Everything is generated once, on this machine, and kept in a folder: ``tokenizer.json`` and ``tokens.npz``. Run
this file to generate it by hand.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

VOCABULARY = 4096
END_OF_FILE = "<|endoftext|>"
# Other people's packages, tests (half of the library, partly generated), and tables rather than prose.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
VALIDATION_SHARE = 20  # one file in this many
TEXT_LIMIT_BYTES = 16_000_000


@dataclass(frozen=True)
class Text:
    """The two splits as token ids (uint16, files one after another), and the tokenizer that made them."""

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer

    def unigram_entropy(self) -> float:
        """Entropy of the validation tokens in nats per token: the best that a model without any context can
        reach."""
        counts = np.bincount(self.validation, minlength=VOCABULARY).astype(np.float64)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


def source_files() -> list[Path]:
    """The standard library's Python files, the same ones in the same order on every run."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))


def read_sources() -> dict[str, str]:
    """Relative path -> text, up to a total size."""
    root, texts, size = Path(sysconfig.get_path("stdlib")), {}, 0
    for path in source_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        size += len(text)
        if size > TEXT_LIMIT_BYTES:
            break
        texts[path.relative_to(root).as_posix()] = text
    return texts


def is_validation(name: str) -> bool:
    """Whether a file is held out: decided by its name alone, so that a longer library moves no file."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % VALIDATION_SHARE == 0


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE: it can encode any text, and decoding returns exactly the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END_OF_FILE], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make(folder: Path) -> None:
    """Writes tokenizer and tokens; the tokens last and atomically, so that a half-written folder is never
    used."""
    texts = read_sources()
    tokenizer = train_tokenizer(text for name, text in texts.items() if not is_validation(name))
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    end = tokenizer.token_to_id(END_OF_FILE)
    for name, encoding in zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True):
        splits["validation" if is_validation(name) else "train"] += [*encoding.ids, end]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    half_made = folder / f"tokens.{os.getpid()}.npz"
    np.savez(half_made, **{split: np.array(ids, dtype=np.uint16) for split, ids in splits.items()})
    half_made.replace(folder / "tokens.npz")


def load(folder: Path) -> Text:
    """What `make` wrote."""
    with np.load(folder / "tokens.npz") as tokens:
        train, validation = tokens["train"], tokens["validation"]
    return Text(train, validation, Tokenizer.from_file(str(folder / "tokenizer.json")))


class Batches:
    """Batches of windows in an order that depends only on the seed, for any number of ranks and from any
    step.

    The windows of an epoch are shuffled once; global batch ``s`` is the ``s``-th run of them, and its
    micro-batches are dealt to the ranks in turn. So one rank that accumulates sees, step by step, the windows
    that two ranks saw between them, and resuming means starting at a different step.
    """

    def __init__(
        self, tokens: np.ndarray, context: int, *, global_batch: int, micro_batch: int, rank: int, ranks: int
    ):
        self.tokens = tokens
        self.context = context
        self.windows = (len(tokens) - 1) // context
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.rank, self.ranks = rank, ranks

    def from_step(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless micro-batches (ids, targets), int64 [micro_batch, context], starting at optimizer step
        ``step``."""
        steps_per_epoch = self.windows // self.global_batch
        while True:
            epoch, position = divmod(step, steps_per_epoch)
            order = np.random.default_rng(epoch).permutation(self.windows)
            batch = order[position * self.global_batch : (position + 1) * self.global_batch]
            mine = batch.reshape(-1, self.ranks, self.micro_batch)[:, self.rank]
            yield from map(self.read, mine)
            step += 1

    def read(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """The windows with these numbers, and the same ones shifted by one token."""
        starts = windows[:, None] * self.context + np.arange(self.context + 1)
        ids = torch.from_numpy(self.tokens[starts].astype(np.int64))
        return ids[:, :-1], ids[:, 1:]


if __name__ == "__main__":
    start = time.perf_counter()
    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "out" / "text")
    make(target)
    text = load(target)
    print(
        f"{len(text.train):,} training and {len(text.validation):,} validation tokens in {target}, "
        f"unigram entropy {text.unigram_entropy():.3f} nats per token, {time.perf_counter() - start:.1f} s"
    )
