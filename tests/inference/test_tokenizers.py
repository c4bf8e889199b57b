"""Additions of a server to a tokenizer: concurrent use, and no work for texts that cannot fit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deepspeed.inference.serving.tokenizers import HuggingFaceTokenizer, characters_per_token


class Pieces:
    """In place of a tokenizer of Transformers: ``width`` characters become a token. ``encoded``: lengths of texts."""

    chat_template = "any"
    added_tokens_decoder: dict[int, Any] = {}
    all_special_ids: list[int] = []

    def __init__(self, width: int) -> None:
        self.width = width
        self.encoded: list[int] = []
        self.meet: threading.Barrier | None = None

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "a" * self.width: 1}

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        self.encoded.append(len(text))
        if self.meet is not None:
            self.meet.wait(30)
        return [1] * -(-len(text) // self.width)

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(each["content"].strip() for each in messages)


def test_several_texts_are_tokenized_at_once() -> None:
    pieces = Pieces(4)
    tokenizer = HuggingFaceTokenizer(pieces)
    pieces.meet = threading.Barrier(3)  # all wait until three have arrived
    with ThreadPoolExecutor(3) as pool:
        chat = pool.submit(tokenizer.chat, [{"content": "abcde"}])
        assert list(pool.map(tokenizer.encode, ["abc", "abcdefghi"])) == [[1], [1] * 3]
        assert chat.result() == [1] * 2


def test_texts_that_cannot_fit_are_refused_by_their_length() -> None:
    pieces = Pieces(4)
    tokenizer = HuggingFaceTokenizer(pieces, max_tokens=10)
    pieces.encoded.clear()
    assert len(tokenizer.encode("a" * 40)) == 10  # the longest that fits
    assert len(tokenizer.chat([{"content": " " * 100 + "a" * 40}])) == 10  # the template removes the blanks
    for call in (tokenizer.encode, lambda text: tokenizer.chat([{"content": text}])):
        with pytest.raises(ValueError, match="41 characters: more than 40 do not fit in 10 tokens"):
            call("a" * 41)
    assert pieces.encoded == [40, 40]
    assert len(HuggingFaceTokenizer(pieces).encode("a" * 4000)) == 1000


def test_a_tokenizer_that_drops_characters_has_no_bound() -> None:
    class Blanks(Pieces):
        def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
            return super().encode(" ".join(text.split()), add_special_tokens)

    assert characters_per_token(Pieces(7)) == 7
    assert characters_per_token(Blanks(7)) is None
    assert len(HuggingFaceTokenizer(Blanks(7), max_tokens=3).encode("a" + " " * 10_000)) == 1
