"""The questions in SQuAD's form: what is made and read, SQuAD's scores, windows, and a short training of both kinds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.scripts import script
from tests.pool import distributed

pytest.importorskip("tokenizers")

TEXT = """\
import os

class Shelf:
    def count(self):
        for book in self.books:
            if not book:
                raise KeyError
        return len(self.books)
    def empty(self):
        return not self.books
"""
SMALL = "--layers 2 --heads 2 --width 32 --dropout 0 --batch 8".split()


TEXTS = {f"shelf{number}.py": TEXT.replace("book", f"book{number}") * 3 for number in range(40)}


def make(folder: Path) -> tuple[Any, list[str]]:
    """The example, and the options that name text and questions on a small library."""
    squad = script("bert_squad")
    data = sys.modules["data"]
    (folder / "text").mkdir()
    tokenizer = data.train_tokenizer(iter([TEXT]))
    tokenizer.save(str(folder / "text/tokenizer.json"))
    tokens = np.array(tokenizer.encode(TEXT * 20).ids, dtype=np.uint16)
    np.savez(folder / "text/tokens.npz", train=tokens, validation=tokens)
    sys.modules["questions"].make(folder / "questions", TEXTS)
    return squad, ["--text", str(folder / "text"), "--questions", str(folder / "questions")]


def test_questions_are_answered_by_their_passage(tmp_path: Path) -> None:
    script("bert_squad")
    questions = sys.modules["questions"]
    questions.make(tmp_path, TEXTS)
    article = json.loads((tmp_path / "train.json").read_text())["data"][0]
    passage = article["paragraphs"][0]
    asked = {each["question"]: each["answers"] for each in passage["qas"]}
    assert "what is returned?" not in asked and "which function is defined?" not in asked  # two of each
    assert [each["text"] for each in asked["which class is defined?"]] == ["Shelf"]
    for question in questions.read(tmp_path / "train.json"):
        assert question.passage[question.begin :].startswith(question.answers[0])
    train, dev = (
        {article["title"] for article in json.loads((tmp_path / f"{split}.json").read_text())["data"]}
        for split in ("train", "dev")
    )
    assert train and dev and not train & dev


def test_windows_hold_the_answer_where_it_stands(tmp_path: Path) -> None:
    script("bert_squad")
    questions, data = sys.modules["questions"], sys.modules["data"]
    questions.make(tmp_path, TEXTS)
    asked = questions.read(tmp_path / "train.json")
    tokenizer = data.train_tokenizer(iter([TEXT]))
    whole = questions.windows(asked, tokenizer, 256, 64)
    parts = questions.windows(asked, tokenizer, 48, 12)
    assert len(whole) == len(asked) < len(parts)
    assert {each.question for each in parts if each.span} == set(range(len(asked)))
    for each in [*whole, *parts]:
        assert len(each.ids) == len(each.segments) and each.length <= len(each.ids)
        if each.span:
            first, last = (each.offsets[place - each.first] for place in each.span)
            wanted = asked[each.question].answers[0]
            assert wanted in asked[each.question].passage[first[0] : last[1]]


def test_scores_are_those_of_squad() -> None:
    script("bert_squad")
    questions = sys.modules["questions"]
    asked = [
        questions.Question("", "", ("the Broncos", "Denver Broncos"), 0),
        questions.Question("", "", ("len(self)",), 0),
    ]
    assert questions.scores({0: "Broncos!"}, asked) == (100.0, 100.0)
    exact, f1 = questions.scores({0: "Denver", 1: "len self"}, asked)
    assert exact == 50.0 and f1 == pytest.approx(100 * (2 / 3 + 1) / 2)


@distributed(world_size=1)
def test_it_learns_with_both_kinds_of_attention(tmp_path: Path) -> None:
    squad, places = make(tmp_path)
    options = [*SMALL, *places, "--length", "160", "--steps", "80", "--lr", "3e-3", "--evaluated", "40"]
    for attention in ("dense", "sparse"):
        (_, before), (_, after) = squad.main([*options, "--attention", attention])
        assert after > before + 30


@distributed(world_size=1)
def test_a_short_passage_is_dense_in_both(tmp_path: Path) -> None:
    """Four blocks are one window of the pattern."""
    squad, places = make(tmp_path)
    torch.manual_seed(0)
    dense = squad.Reader(squad.parse_arguments([*SMALL, *places, "--length", "64"])).eval()
    sparse = squad.Reader(
        squad.parse_arguments([*SMALL, *places, "--length", "64", "--attention", "sparse"])
    ).eval()
    assert set(sparse.load_state_dict(dense.state_dict(), strict=False).missing_keys) == {
        f"bert.layers.{layer}.attention.master_layout" for layer in range(2)
    }
    ids = torch.randint(4096, (3, 64))
    segments = (torch.arange(64) >= 9).long().expand(3, 64)
    mask = torch.zeros(3, 1, 1, 64)
    mask[1, ..., 50:] = -10_000.0
    torch.testing.assert_close(sparse(ids, segments, mask), dense(ids, segments, mask), rtol=1e-4, atol=1e-4)


@distributed(world_size=1)
def test_it_begins_with_a_checkpoint_of_pre_training(tmp_path: Path) -> None:
    squad, places = make(tmp_path)
    pre_training = script("bert_pretraining")
    sizes = [*SMALL[:-2], "--lengths", "16", "32"]
    pre_training.main(
        [*sizes, *places[:2], "--tokens", "128", "--steps", "6", "--output", str(tmp_path / "bert")]
    )
    options = [*SMALL, *places, "--positions", "32", "--length", "32", "--pretrained", str(tmp_path / "bert")]
    reader = squad.Reader(squad.parse_arguments(options))
    random = squad.Reader(squad.parse_arguments(options[:-2]))
    assert not torch.equal(reader.bert.words.weight, random.bert.words.weight)
    assert reader.bert.transform[2].weight.std() > 0  # a norm begins with ones
