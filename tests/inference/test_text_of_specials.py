"""Text of a stream in which there are tokens that are left out, against ``decode`` of all tokens at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deepspeed.inference.serving.text import TextStream

tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")

SPECIALS = {100: "<|im_end|>", 101: "<s>"}


def metaspace() -> Any:
    return tokenizers.decoders.Metaspace()


def llama() -> Any:
    decoders = tokenizers.decoders
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


def word_piece() -> Any:
    return tokenizers.decoders.WordPiece(prefix="##", cleanup=True)


def decode_of(decoder: Any) -> Any:
    """100 words of each kind, and the specials, as a tokenizer with this decoder decodes them."""
    words = ["▁Hello", "▁", "world", "##s", "!", "▁a", "<0xC3>", "<0xBC>", "▁<|im", "_end|>"]
    vocabulary = {word: at for at, word in enumerate(words)}
    vocabulary.update(
        {f"▁word{at}": at for at in range(len(words), 100)}, **{v: k for k, v in SPECIALS.items()}
    )
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="!"))
    raw.decoder = decoder
    raw.add_special_tokens(list(SPECIALS.values()))
    return lambda tokens: raw.decode(tokens, skip_special_tokens=True)


def said(decode: Any, tokens: list[int], *stops: str, **more: Any) -> tuple[str, bool]:
    stream = TextStream(decode, stops, specials=SPECIALS, **more)
    return "".join([stream.add(token) for token in tokens]) + stream.finish(), stream.stopped


@pytest.mark.parametrize("kind", [metaspace, llama, word_piece])
def test_a_stream_says_what_all_tokens_say(kind: Any) -> None:
    """No space is lost after a special token, or after one without text, wherever they are."""
    decode, source = decode_of(kind()), random.Random(0)
    for _ in range(300):
        # 120 is in no vocabulary: models have more outputs than their tokenizers have tokens.
        tokens = source.choices([0, 0, 1, 2, 3, 4, 5, 6, 100, 101, 120, 20], k=source.randint(1, 12))
        tokens = [each for token in tokens for each in ((6, 7) if token == 6 else (token,))]
        assert said(decode, tokens)[0] == decode(tokens), tokens


@pytest.mark.parametrize("kind", [metaspace, llama, word_piece])
def test_text_that_continues_a_prompt(kind: Any) -> None:
    decode = decode_of(kind())
    for prompt, tokens in (([0, 20], [0, 20]), ([0, 100], [20]), ([20], [100, 0, 4])):
        text, _ = said(decode, tokens, before=prompt)
        assert decode(prompt) + text == decode(prompt + tokens)


@pytest.mark.parametrize("kind", [metaspace, llama])
def test_special_tokens_that_are_shown(kind: Any) -> None:
    decode = decode_of(kind())
    tokens = [0, 101, 20, 4, 100, 2, 4]
    assert said(decode, tokens, shown=(101,))[0] == "Hello<s> word20!world!"
    assert said(decode, tokens, shown=SPECIALS)[0] == "Hello<s> word20!<|im_end|>world!"
    assert said(decode, [0, 101, 20], "<s>", shown=(101,)) == ("Hello", True)
    assert said(decode, [0, 101, 20], "<s> w", shown=(101,), include_stop=True) == ("Hello<s> w", True)


def test_a_special_token_is_a_stop() -> None:
    decode = decode_of(llama())
    assert said(decode, [0, 20, 100, 0], "<|im_end|>") == ("Hello word20", True)
    assert said(decode, [100, 0], "<|im_end|>") == ("", True)
    assert said(decode, [0, 101, 20], "<|im_end|>") == ("Hello word20", False)
    assert said(decode, [0, 8, 9, 20], "<|im_end|>") == ("Hello ", True)  # the same text of other tokens


def test_a_special_token_in_the_midst_of_a_stop() -> None:
    decode = decode_of(llama())
    assert said(decode, [0, 4, 100, 20, 5], "!<|im_end|> word20") == ("Hello", True)
    assert said(decode, [0, 4, 101, 20, 5], "!<|im_end|> word20") == ("Hello! word20 a", False)
    assert said(decode, [0, 4, 100], "!<|im_end|> word20") == ("Hello!", False)
    assert said(decode, [0, 4, 100, 101, 20], "<s>", "!<|im_end|>") == ("Hello", True)


def test_a_special_token_in_the_midst_of_what_is_shown() -> None:
    """A stop that has no special token in it ends the text that the client sees."""
    decode = decode_of(llama())
    assert said(decode, [0, 4, 101, 20, 5], "! word2", "<|im_end|>") == ("Hello", True)
    assert said(decode, [0, 6, 101, 7, 5], "ü", "<s>!") == ("Hello", True)


def test_the_texts_of_tokens_are_together_that_of_all() -> None:
    decode = decode_of(metaspace())
    stream = TextStream(decode, specials=SPECIALS)
    pieces = []
    for token in (0, 20, 101, 2, 0):
        pieces += stream.texts_of([token])
        stream.add(token)
    assert pieces == ["Hello", " word20", "", "world", " Hello"]
