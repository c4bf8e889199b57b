"""Request fields that change logits, converted to sampling parameters. Pure, except for the tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from deepspeed.inference.scheduling.requests import Constraint
from deepspeed.inference.serving.bodies import RequestError, kind_of

_MAX_TOKENS = 1024
"""Most tokens in a list, or biases; OpenAI's limit for biases."""

_MAX_WORDS, _WORD_LENGTH, _MAX_CHOICES = 64, 200, 256
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}


def sampling_of(request: Any, encode: Callable[[str], list[int]]) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` that all sequences of a request share. ``encode``: text to tokens,
    without special tokens. RequestError: a field is malformed."""
    allowed = tokens_of(request.allowed_token_ids, "allowed_token_ids")
    return {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": _biases(request.logit_bias),
        "allowed_token_ids": None if request.allowed_token_ids is None else allowed,
        "bad_words": _bad_words(request.bad_words, encode),
        "constraint": constraint_of(request),
    }


def constraint_of(request: Any) -> Constraint | None:
    """Return the grammar requested in OpenAI's form (``response_format``) or in vLLM's (``structured_outputs``,
    ``guided_json`` and the like). RequestError: malformed, or more than one."""
    found = [
        *_of_format(request.response_format),
        *_of_structure(request.structured_outputs),
        *(
            _constraint(kind, getattr(request, name), name)
            for name, kind in _GUIDED.items()
            if getattr(request, name) is not None
        ),
    ]
    if len(found) > 1:
        raise RequestError("only one grammar per response: keep one of them", "structured_outputs")
    return found[0] if found else None


def _of_format(given: Any) -> list[Constraint]:
    kind = (given or {"type": "text"}).get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [Constraint("json_object")]
    if kind != "json_schema":
        allowed = "text, json_object or json_schema"
        raise RequestError(f"response_format.type is {allowed}, not {_short(kind)}", "response_format.type")
    where = "response_format.json_schema.schema"
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if schema is None:
        raise RequestError(f"{where} is missing", where)
    return [_constraint("json", schema, where)]


def _of_structure(given: Any) -> list[Constraint]:
    made, name = [], "structured_outputs"
    for key, value in (given or {}).items():
        if value is None or value is False:
            continue
        if key not in _KINDS:
            known = ", ".join(_KINDS)
            raise RequestError(f"{name}.{key[:64]} is not supported; use {known}", f"{name}.{key[:64]}")
        made.append(_constraint(key, value, f"{name}.{key}"))
    return made


def _constraint(kind: str, value: Any, where: str) -> Constraint:
    if kind == "json" and isinstance(value, (dict, bool)):
        value = json.dumps(value)
    elif kind == "choice":
        texts = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
        if not texts or not 1 <= len(value) <= _MAX_CHOICES:
            raise RequestError(f"{where}: expected a list of 1 to {_MAX_CHOICES} strings", where)
        value = json.dumps(value)
    elif kind == "json_object":
        value = ""
    if not isinstance(value, str):
        raise RequestError(f"{where}: expected a string, not {kind_of(value)}", where)
    return Constraint("json_schema" if kind == "json" else kind, value)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    if given is None:
        return ()
    if not isinstance(given, dict) or len(given) > _MAX_TOKENS:
        raise RequestError(f"logit_bias: expected an object of up to {_MAX_TOKENS} tokens", "logit_bias")
    made = []
    for token, value in given.items():
        where = f"logit_bias.{token[:64]}"
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise RequestError(f"{where}: its name must be a token id", where)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or abs(value) > 100:
            raise RequestError(f"{where}: expected a number from -100 to 100", where)
        made.append((int(token), float(value)))
    return tuple(made)


def tokens_of(given: Any, name: str) -> tuple[int, ...]:
    """Return the field ``name`` as a tuple of tokens. RequestError: malformed."""
    if given is None:
        return ()
    right = isinstance(given, list) and len(given) <= _MAX_TOKENS
    if not right or any(type(token) is not int or not 0 <= token < 2**31 for token in given):
        raise RequestError(f"{name}: expected a list of up to {_MAX_TOKENS} tokens", name)
    return tuple(given)


def _bad_words(given: Any, encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """Tokenize each word both at the start of a text and after a space: tokenizers may distinguish these."""
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > _MAX_WORDS:
        raise RequestError(f"bad_words: expected a list of up to {_MAX_WORDS} strings", "bad_words")
    made: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(given):
        if not isinstance(word, str) or not 1 <= len(word) <= _WORD_LENGTH:
            where = f"bad_words.{place}"
            raise RequestError(f"{where}: expected a string of 1 to {_WORD_LENGTH} characters", where)
        made.update({tuple(encode(text)): None for text in (word, f" {word}")})
    return tuple(word for word in made if word)


def _short(value: Any) -> str:
    return repr(value[:64]) if isinstance(value, str) else kind_of(value)
