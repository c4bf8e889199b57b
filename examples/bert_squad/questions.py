"""Questions in SQuAD's form: a file of them made from local text, reading such files, and SQuAD's two scores.

What is made has passages of Python's standard library, and questions on them that a line of the passage answers. Files
of SQuAD 1.1 have the same form and are read by the same functions.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bert import CLS, SEP
from data import is_validation, read_sources
from tokenizers import Tokenizer
from torch import Tensor

# A passage has a question if exactly one of its lines answers it.
QUESTIONS = {
    "which function is defined?": r"^ *def (\w+)\(",
    "which class is defined?": r"^ *class (\w+)",
    "what is returned?": r"^ *return (\S.*)$",
    "what is raised?": r"^ *raise (\w+)",
    "which module is imported?": r"^ *(?:import|from) ([\w.]+)",
    "what does the loop go through?": r"^ *for .+ in (\S.*):$",
}
LINES = 10


# Files ------------------------------------------------------------------------------------------------------


def make(folder: Path, texts: dict[str, str] | None = None, passages: int = 20_000) -> None:
    """Write ``train.json`` and ``dev.json`` on ``texts`` by name, or those of the standard library; the two files have
    different texts."""
    folder.mkdir(parents=True, exist_ok=True)
    articles: dict[str, list[Any]] = {"train": [], "dev": []}
    made = 0
    for name, text in (texts or read_sources()).items():
        found = list(passages_of(name, text))
        made += len(found)
        if found and made <= passages:
            articles["dev" if is_validation(name) else "train"].append({"title": name, "paragraphs": found})
    for split, data in articles.items():
        (folder / f"{split}.json").write_text(json.dumps({"version": "1.1", "data": data}))


def passages_of(name: str, text: str) -> Iterator[dict[str, Any]]:
    lines = text.splitlines()
    for first in range(0, len(lines), LINES):
        passage = "\n".join(lines[first : first + LINES])
        asked = []
        for question, pattern in QUESTIONS.items():
            answers = list(re.finditer(pattern, passage, flags=re.M))
            if len(answers) == 1:
                answer = {"text": answers[0][1], "answer_start": answers[0].start(1)}
                asked.append(
                    {"id": f"{name}:{first}:{len(asked)}", "question": question, "answers": [answer]}
                )
        if len(asked) > 1 and len(passage) < 500:  # so that the passage alone does not give the answer
            yield {"context": passage, "qas": asked}


@dataclass(frozen=True)
class Question:
    text: str
    passage: str
    answers: tuple[str, ...]
    begin: int
    """Where the first answer stands in the passage, in characters."""


def read(path: Path) -> list[Question]:
    """All questions of a file in SQuAD's form that have an answer."""
    return [
        Question(
            asked["question"],
            passage["context"],
            tuple(answer["text"] for answer in asked["answers"]),
            asked["answers"][0]["answer_start"],
        )
        for article in json.loads(path.read_text(encoding="utf-8"))["data"]
        for passage in article["paragraphs"]
        for asked in passage["qas"]
        if asked["answers"]
    ]


# Tokens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A question with as much of its passage as fits: CLS, question, SEP, passage, SEP; then SEP that is hidden."""

    question: int
    ids: list[int]
    segments: list[int]
    length: int
    """Without what is hidden."""
    first: int
    """Where the passage begins in ``ids``."""
    offsets: list[tuple[int, int]]
    """For each token of the passage its characters."""
    span: tuple[int, int] | None
    """First and last token of the answer in ``ids``; None if it is not in this window."""


def windows(questions: Sequence[Question], tokenizer: Tokenizer, length: int, stride: int) -> list[Window]:
    """Long passages become several windows, each ``stride`` tokens further on."""
    asked = tokenizer.encode_batch([question.text for question in questions])
    passages = tokenizer.encode_batch([question.passage for question in questions])
    found = []
    for number, question in enumerate(questions):
        ids, offsets = passages[number].ids, passages[number].offsets
        head = [CLS, *asked[number].ids, SEP]
        room = length - len(head) - 1
        for begin in range(0, max(len(ids) - room, 0) + stride, stride):
            part = ids[begin : begin + room]
            if not part:
                break
            whole = [*head, *part, SEP]
            rest = length - len(whole)
            found.append(
                Window(
                    number,
                    whole + [SEP] * rest,
                    [0] * len(head) + [1] * (length - len(head)),
                    len(whole),
                    len(head),
                    offsets[begin : begin + room],
                    _span(question, offsets[begin : begin + room], len(head)),
                )
            )
    return found


def _span(question: Question, offsets: Sequence[tuple[int, int]], first: int) -> tuple[int, int] | None:
    begin, end = question.begin, question.begin + len(question.answers[0])
    if not offsets or offsets[0][0] > begin or offsets[-1][1] < end:
        return None
    inside = [place for place, (left, right) in enumerate(offsets) if left < end and right > begin]
    return (first + inside[0], first + inside[-1]) if inside else None


def stacked(chosen: Sequence[Window]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, segments [batch, length]; what is added to the scores [batch, 1, 1, length]; spans [batch, 2]."""
    ids = torch.tensor([window.ids for window in chosen])
    lengths = torch.tensor([window.length for window in chosen])
    hidden = torch.arange(ids.shape[1]) >= lengths[:, None]
    spans = torch.tensor([window.span or (0, 0) for window in chosen])
    mask = torch.zeros(ids.shape).masked_fill(hidden, -10_000.0)
    return ids, torch.tensor([window.segments for window in chosen]), mask[:, None, None, :], spans


# Scores -----------------------------------------------------------------------------------------------------


def normalized(answer: str) -> list[str]:
    """Words without case, punctuation and articles."""
    letters = answer.lower().translate(str.maketrans(dict.fromkeys(string.punctuation, " ")))
    return [word for word in letters.split() if word not in ("a", "an", "the")]


def scores(answers: dict[int, str], questions: Sequence[Question]) -> tuple[float, float]:
    """Exact match and F1 in percent, against the best of each question's answers."""
    exact = overlap = 0.0
    for number, answer in answers.items():
        ours = normalized(answer)
        theirs = [normalized(each) for each in questions[number].answers]
        exact += ours in theirs
        overlap += max(_f1(ours, each) for each in theirs)
    return 100 * exact / len(answers), 100 * overlap / len(answers)


def _f1(ours: list[str], theirs: list[str]) -> float:
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else float(ours == theirs)
