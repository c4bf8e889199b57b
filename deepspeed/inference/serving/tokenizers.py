"""Tokenizers as a server needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from deepspeed.inference.serving.bodies import RequestError

BEGIN = MappingProxyType({"add_generation_prompt": True})
"""Template arguments for a prompt that an answer follows."""


class HuggingFaceTokenizer:
    """A tokenizer of Transformers. Thread-safe.

    Args:
        tokenizer: must not encode elsewhere, as that may change its padding and truncation.
        max_tokens: of a prompt. ``encode`` and ``chat`` raise ValueError for a text whose length alone implies more;
            None: never.

    ``specials``: tokens that ``decode`` omits, and their texts. ``chat`` raises ValueError if the tokenizer has no chat
    template, or the template refuses the messages.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        # Also encodes: the first call disables padding and truncation; later calls find them disabled and only read.
        longest = characters_per_token(tokenizer)
        self._max_characters = None if max_tokens is None or longest is None else max_tokens * longest
        self.specials = self._left_out()

    @property
    def template(self) -> str:
        """All chat templates, concatenated; empty: none."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True)

    def words(self, text: str) -> list[int]:
        """Tokenize a part of a text: without special tokens."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        # Cleaning up would remove spaces that have already been sent.
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_all(self, tokens: list[int]) -> str:
        """Decode with special tokens."""
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def names(self, tokens: list[int]) -> list[str]:
        """Return the vocabulary entries; "" for a token without one."""
        return [name or "" for name in self._tokenizer.convert_ids_to_tokens(tokens)]

    def info(self) -> dict[str, Any]:
        """Return the class, the special tokens by role, and the chat template."""
        known = self._tokenizer
        roles = {
            name: str(value) for name, value in known.special_tokens_map.items() if isinstance(value, str)
        }
        absent = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        template = getattr(known, "chat_template", None)
        return {"tokenizer_class": type(known).__name__, "chat_template": template, **absent, **roles}

    def chat(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any] = BEGIN) -> list[int]:
        """Tokenize a chat. ``arguments``: of the template and of ``apply_chat_template``."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError("the model has no chat template: use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), **{**arguments, "tokenize": False})
        except Exception as error:  # templates raise arbitrary exceptions
            raise ValueError(f"the chat template rejected the messages: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._max_characters is not None and len(text) > self._max_characters:
            problem = (
                f"the prompt has {len(text):,} characters: more than {self._max_characters:,} do not fit in"
            )
            raise RequestError(f"{problem} {self._max_tokens:,} tokens", None, "context_length_exceeded")
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def _left_out(self) -> dict[int, str]:
        known = self._tokenizer
        added = {token: each.content for token, each in known.added_tokens_decoder.items() if each.special}
        named = {token: known.convert_ids_to_tokens(token) for token in known.all_special_ids}
        return {
            token: text for token, text in {**named, **added}.items() if text and not self.decode([token])
        }


def characters_per_token(tokenizer: Any) -> int | None:
    """Return the most characters of a text that one token can cover: the length of the longest vocabulary entry. None:
    unbounded, as the tokenizer drops characters, or joins runs of blanks, of unknown characters or of whole words."""
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    # The last is a private-use character, in no vocabulary.
    for character in (" ", "\n", "a", "\ue000"):
        run = character * (1000 + 4 * longest)  # WordPiece treats words of over 100 characters as unknown
        if len(tokenizer.encode(run, add_special_tokens=False, verbose=False)) * longest < len(run):
            return None
    return longest
