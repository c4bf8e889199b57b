"""Text and tokens, as a server needs them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...
    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]: ...


class HuggingFaceTokenizer:
    """A tokenizer of Transformers. ``encode`` and ``chat`` may be called from several threads.

    ``chat`` raises ValueError if it has no template for chats, or if the template refuses the messages.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # encoding sets what it pads and cuts in the tokenizer

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer.encode(text))

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

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
