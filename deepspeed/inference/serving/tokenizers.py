"""Text and tokens, as a server needs them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """``specials``: the tokens that ``decode`` leaves out, and their texts."""

    @property
    def specials(self) -> Mapping[int, str]: ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...
    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]: ...


class HuggingFaceTokenizer:
    """A tokenizer of Transformers. ``encode`` and ``chat`` may be called from several threads.

    ``chat`` raises ValueError if it has no template for chats, or if the template refuses the messages.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.specials = self._left_out()
        self._lock = threading.Lock()  # encoding sets what it pads and cuts in the tokenizer

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer.encode(text))

    def decode(self, tokens: list[int]) -> str:
        # Cleaning up would take back spaces that have been sent.
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError("the model has no chat template: use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _left_out(self) -> dict[int, str]:
        known = self._tokenizer
        added = {token: each.content for token, each in known.added_tokens_decoder.items() if each.special}
        named = {token: known.convert_ids_to_tokens(token) for token in known.all_special_ids}
        return {
            token: text for token, text in {**named, **added}.items() if text and not self.decode([token])
        }
