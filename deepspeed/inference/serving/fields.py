"""Known request fields, and the errors for all others. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

from deepspeed.inference.serving.bodies import RequestError

HARMLESS = frozenset(
    {
        # OpenAI's: billing, storage and caches
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        # other servers': when and how to compute
        "cache_prompt",
        "cache_salt",
        "guided_decoding_backend",
        "request_id",
    }
)
"""Accepted with any value and ignored: none of their values changes an answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "suffix": ("",),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # other servers'
    "chat_template": (),
    "include_reasoning": (True,),
    "detokenize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_logprobs": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
"""Unsupported fields that would change an answer, with the values that do not. Null is always accepted."""

STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""The last (padding of events against eavesdroppers) is accepted without effect."""

_ALSO_CALLED = {
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
}
_ELSEWHERE = {"input": "/v1/responses", "messages": "/v1/chat/completions", "prompt": "/v1/completions"}
NAME_LENGTH = 64


def check_names(
    values: Mapping[str, Any],
    own: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
    *,
    inside: str = "",
) -> None:
    """Check that each key of ``values`` is a field of ``own``, harmless, or neutral. RequestError names the first that
    is not. ``inside``: the enclosing field, with a trailing dot."""
    for name, value in values.items():
        if value is None or name in own or (name in HARMLESS and not inside):
            continue
        short = inside + name[:NAME_LENGTH]
        if name not in neutral:
            raise RequestError(f"unknown field {short!r}{_hint(name, own, neutral)}", short)
        if value not in neutral[name]:
            other = " or ".join(json.dumps(each) for each in neutral[name])
            raise RequestError(f"{short} is not supported{other and f', other than {other}'}", short)


def _hint(name: str, own: Collection[str], neutral: Collection[str]) -> str:
    if name in _ELSEWHERE and name not in own:
        return f": it belongs to {_ELSEWHERE[name]}"
    short = name[:NAME_LENGTH].lower()
    known = [*own, *neutral]
    alike = [_ALSO_CALLED.get(short, ""), *difflib.get_close_matches(short, known, n=1, cutoff=0.6)]
    return next((f": did you mean {each!r}?" for each in alike if each in known), "")
