"""BERT's pre-training in a short form: what is masked, both phases, and the kernels against torch's own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.scripts import script
from tests.pool import distributed

pytest.importorskip("tokenizers")

SMALL = "--lengths 16 32 --tokens 256 --layers 2 --heads 2 --width 32 --dropout 0".split()


def make_text(folder: Path) -> list[str]:
    """Tokens that repeat, so that a masked one can be told from its neighbours; the option that names the folder."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    tokens = np.tile(np.arange(50, dtype=np.uint16), 100)
    np.savez(folder / "tokens.npz", train=tokens, validation=tokens)
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    return ["--text", str(folder)]


def test_words_are_masked_as_a_whole() -> None:
    bert = script("bert_pretraining")
    tokens = np.tile(np.arange(60, dtype=np.uint16), 200)
    starts = torch.arange(bert.VOCABULARY) % 3 == 0  # words of three tokens
    batch = bert.draw(tokens, starts, 256, 63, seed=0)
    chosen = batch.labels != bert.IGNORED
    assert 0.13 < chosen.float().mean() < 0.17
    assert (batch.ids[chosen] == bert.MASK).float().mean() == pytest.approx(0.8, abs=0.03)
    whole = batch.ids.masked_scatter(chosen, batch.labels[chosen])
    word = whole[:, 1:31] // 3  # the first passage; its first and last word may be cut
    same = word[:, 1:] == word[:, :-1]
    assert same.any() and (chosen[:, 2:31] == chosen[:, 1:30])[same].all()
    behind = (whole[:, 30] + 1) % 60 == whole[:, 32]
    assert behind[batch.follows == 1].all() and not behind[batch.follows == 0].all()
    assert batch.segments[0].tolist() == [0] * 32 + [1] * 31


@distributed(world_size=1)
def test_kernels_train_as_torchs_layers_do(tmp_path: Path) -> None:
    bert = script("bert_pretraining")
    options = [*SMALL, *make_text(tmp_path / "text"), "--steps", "3", "--optimizer", "AdamW"]
    ours, torchs = (bert.main([*options, "--layers_of", name]) for name in ("deepspeed", "torch"))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(torchs), rtol=2e-4, atol=2e-4)


@distributed(world_size=2)
@pytest.mark.parametrize("optimizer", ["Lamb", "OneBitLamb"])
def test_both_phases(tmp_path: Path, optimizer: str) -> None:
    bert = script("bert_pretraining")
    text: list[Any] = [make_text(tmp_path / "text") if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(text)
    first, second = bert.main([*SMALL, *text[0], "--steps", "20", "--lr", "3e-2", "--optimizer", optimizer])
    assert first[1][0] < first[0][0] - 0.2  # masked words
    assert second[0][0] == pytest.approx(first[1][0], abs=0.1)  # from the weights of the first phase
    assert second[1][0] < second[0][0] - 0.1
