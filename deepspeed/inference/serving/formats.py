"""Formats in which models write tool calls and reasoning: readers, and grammars that make a model write them.

Names are those of vLLM's parsers. A new format is a reader function and a `ToolFormat` in `TOOL_FORMATS`.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.inference.generation.grammars import JSON_OPTIONS
from deepspeed.inference.serving.pieces import AnswerText, Reading, Tools, json_call, long_id
from deepspeed.inference.serving.tool_schemas import kinds_of

_PYTHON_TAG = "<|python_tag|>"


def _short_id() -> str:
    """Make a 9-character id, as Mistral's templates require."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


# ----------------------------------------------------------------------------------------------------------- reading


def read_hermes(source: AnswerText, tools: Tools) -> Reading[None]:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once per call."""
    while (yield from source.text_until("<tool_call>")):
        yield from source.spaces()
        if (yield from json_call(source, tools)):
            yield from source.spaces()
            yield from source.skip("</tool_call>")
        else:
            source.emit_kept()


def read_llama3(source: AnswerText, tools: Tools) -> Reading[None]:
    """Read ``{"name": ..., "parameters": {...}}``, repeated after semicolons, at the start of the answer or after
    ``<|python_tag|>``."""
    source.keep()
    yield from source.spaces()
    yield from source.skip(_PYTHON_TAG)
    found = _PYTHON_TAG
    while found:
        yield from source.spaces()
        yield from _calls(source, tools, ";")
        found = yield from source.text_until(_PYTHON_TAG)


def read_mistral(source: AnswerText, tools: Tools) -> Reading[None]:
    """Read ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name{...}`` per call, where newer
    models write ``[CALL_ID]id`` and ``[ARGS]`` after the name."""
    while (yield from source.text_until("[TOOL_CALLS]")):
        yield from source.spaces()
        if (yield from source.skip("[")):
            yield from source.spaces()
            if (yield from _calls(source, tools, ",")):
                yield from source.skip("]")
        else:
            yield from _named(source, tools)


def read_xml(source: AnswerText, tools: Tools) -> Reading[None]:
    """Read ``<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>``; values are JSON
    unless the parameter's schema is a string."""
    while marker := (yield from source.text_until("<tool_call>", "<function=")):
        if marker == "<tool_call>":
            yield from source.spaces()
            if not (yield from source.skip("<function=")):
                source.emit_kept()
                continue
        name = yield from source.word()
        if name not in tools or not (yield from source.skip(">")):
            source.emit_kept()
            continue
        source.begin(name)
        if (yield from _parameters(source, tools[name])):
            source.close()
            yield from source.spaces()
            yield from source.skip("</tool_call>")


def _calls(source: AnswerText, tools: Tools, between: str) -> Reading[bool]:
    """Read objects separated by ``between``; anything else becomes text. Return False if there are none."""
    found = False
    while (yield from json_call(source, tools)):
        found = True
        source.keep()
        yield from source.spaces()
        if not (yield from source.skip(between)):
            break
        yield from source.spaces()
    source.emit_kept()
    return found


def _named(source: AnswerText, tools: Tools) -> Reading[None]:
    name = yield from source.word()
    if (yield from source.skip("[CALL_ID]")):
        yield from source.word()
    yield from source.skip("[ARGS]")
    yield from source.spaces()
    if name not in tools or (yield from source.peek(1)) != "{":
        source.emit_kept()
        return
    source.begin(name)
    if (yield from source.value(source.emit_arguments)):
        source.close()


def _parameters(source: AnswerText, schema: Mapping[str, Any]) -> Reading[bool]:
    """Read parameters up to ``</function>``. Return False if something else comes between, or the end is missing."""
    known, before = schema.get("properties"), "{"
    while True:
        yield from source.spaces()
        if (yield from source.skip("</function>")):
            source.emit_arguments("{}" if before == "{" else "}")
            return True
        if not (yield from source.skip("<parameter=")):
            return False
        key = yield from source.until(">")
        value = None if key is None else (yield from source.until("</parameter>"))
        if key is None or value is None:
            return False
        described = known.get(key) if isinstance(known, dict) else None
        quoted = json.dumps(key, ensure_ascii=False)
        source.emit_arguments(
            f"{before}{quoted}: {_json_of(value.removeprefix(chr(10)).removesuffix(chr(10)), described, schema)}"
        )
        before = ", "


def _json_of(value: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Return a parameter's value as JSON. ``schema``: the parameter's, within ``root``."""
    kinds = kinds_of(schema, root)
    if value in ("null", "None") and "null" in kinds:
        return "null"
    if not kinds or "string" in kinds:
        return json.dumps(value, ensure_ascii=False)
    text = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value.strip())
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return text


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


# ---------------------------------------------------------------------------------------------------------- grammars


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Reader and grammar of one format of tool calls.

    Args:
        read: reads an answer, given the functions that may be called.
        call: grammar of a call: templates with ``{name}``, before and after the arguments.
        begin, between, end: text around and between the calls.
        specials: markers that some tokenizers have as special tokens, which `read` must see.
        make_id: makes the id of a call.
        as_xml: arguments are written in the form of `read_xml`, not as JSON.
    """

    read: Callable[[AnswerText, Tools], Reading[None]]
    call: tuple[str, str]
    begin: str = ""
    between: str = "\n"
    end: str = ""
    specials: tuple[str, ...] = ()
    make_id: Callable[[], str] = long_id
    as_xml: bool = False


_TOOL_CALL = ("<tool_call>", "</tool_call>")

_HERMES = ToolFormat(
    read_hermes,
    ('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
    specials=_TOOL_CALL,
)
_LLAMA3 = ToolFormat(
    read_llama3, ('{"name": "{name}", "parameters": ', "}"), between="; ", specials=(_PYTHON_TAG,)
)
_MISTRAL = ToolFormat(
    read_mistral,
    ('{"name": "{name}", "arguments": ', "}"),
    begin="[TOOL_CALLS][",
    between=", ",
    end="]",
    specials=("[TOOL_CALLS]",),
    make_id=_short_id,
)
_MISTRAL_NAMED = ToolFormat(
    read_mistral,
    ("[TOOL_CALLS]{name}[ARGS]", ""),
    between="",
    specials=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    make_id=_short_id,
)
_XML = ToolFormat(
    read_xml,
    ("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"),
    specials=_TOOL_CALL,
    as_xml=True,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA3,
    "mistral": _MISTRAL,
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
}


def tool_format(name: str, specials: Sequence[str] = ()) -> ToolFormat:
    """Return the format ``name``; ``specials``: texts of special tokens, which distinguish Mistral's two formats."""
    return _MISTRAL_NAMED if name == "mistral" and "[ARGS]" in specials else TOOL_FORMATS[name]


def grammar(form: ToolFormat, tools: Tools, *, many: bool, specials: Mapping[str, int]) -> str:
    """Return the grammar (Lark, as llguidance reads it) of one call to one of ``tools``, or of ``many`` calls.
    ``specials``: special tokens of the tokenizer, by text."""

    def text(value: str) -> str:
        return _literal(value, form.specials, specials)

    more = f" ({text(form.between)} call)*" if many else ""
    rules = [
        f"start: {text(form.begin)} call{more} {text(form.end)}",
        "call: " + " | ".join(f"call_{place}" for place in range(len(tools))),
    ]
    for place, (name, schema) in enumerate(tools.items()):
        before, after = (text(part.replace("{name}", name)) for part in form.call)
        rules.append(f"call_{place}: {before} with_{place} {after}")
        made = (
            _xml_rules(f"with_{place}", schema)
            if form.as_xml
            else [f"with_{place}: %json {_options_in(schema)}"]
        )
        rules += made
    return "\n".join(rules) + "\n"


def _options_in(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _literal(value: str, markers: Sequence[str], specials: Mapping[str, int]) -> str:
    """Return a text in Lark, with markers that are special tokens replaced by these."""
    there = [each for each in markers if each in specials]
    parts = re.split("(" + "|".join(map(re.escape, there)) + ")", value) if there else [value]
    made = [f"<[{specials[part]}]>" if part in there else json.dumps(part) for part in parts if part]
    return " ".join(made)


def _xml_rules(name: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the rules of parameters in schema order: required ones once, others at most once."""
    known, needed = schema.get("properties") or {}, set(schema.get("required") or ())
    shared = {place: schema[place] for place in ("$defs", "definitions") if place in schema}
    parts = [f"{name}_{at}" + "?" * (key not in needed) for at, key in enumerate(known)]
    rules, end = [f"{name}: " + (" ".join(parts) or '""')], json.dumps("\n</parameter>\n")
    for at, (key, each) in enumerate(known.items()):
        begin = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        own, value = f"{name}_{at}", f"{name}_{at}_value"
        kinds = kinds_of(each, schema)
        allowed = each.get("enum", ()) if isinstance(each, dict) else ()
        texts = [json.dumps(one, ensure_ascii=False) for one in allowed if isinstance(one, str)]
        if kinds and "string" not in kinds:
            rules += [f"{own}: {begin} {value} {end}", f"{value}: %json {_options_in({**shared, **each})}"]
        elif texts:
            rules.append(f"{own}: {begin} ({' | '.join(texts)}) {end}")
        else:
            rules += [f"{own}: {begin} {value}", f"{value}[suffix={end}]: /(?s:.*)/"]
    return rules


# --------------------------------------------------------------------------------------------------------- reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """``begin`` and ``end``: markers around reasoning at the start of an answer. ``always``: an answer starts with
    reasoning even without ``begin``, unless the prompt has ended it."""

    begin: str
    end: str
    always: bool = False

    def begins_in(self, prompt: str) -> bool:
        """Return whether an answer to ``prompt`` (its end suffices) starts inside reasoning."""
        before = prompt.rstrip()
        return before.endswith(self.begin) or (self.always and not before.endswith(self.end))

    def ends_inside(self, message: str) -> bool:
        """Return whether the partial ``message`` ends inside reasoning."""
        return message.rfind(self.begin) > message.rfind(self.end)

    def reader(self, inside: bool) -> Callable[[AnswerText], Reading[None]]:
        """Return a reader of reasoning; ``inside``: the answer starts within it."""

        def read(source: AnswerText) -> Reading[None]:
            source.keep()
            yield from source.spaces()
            if not (yield from source.skip(self.begin)) and not inside:
                source.emit_kept()
                return
            source.drop()
            source.emit("reasoning", "")
            yield from source.pass_until((self.end,), lambda text: source.emit("reasoning", text))
            source.emit("text", "")

        return read


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "qwen3": ReasoningFormat("<think>", "</think>"),
}


# ---------------------------------------------------------------------------------------------------------- guessing


def guessed_tool_format(template: str) -> str | None:
    """Return the name of the tool format that a chat template uses; None: none of the known ones."""
    for mark, name in (
        ("<parameter=", "qwen3_coder"),
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        (_PYTHON_TAG, "llama3_json"),
        ('"parameters"', "llama3_json"),
    ):
        if mark in template and "tools" in template:
            return name
    return None


def guessed_reasoning_format(template: str) -> str | None:
    """Return the name of the reasoning format that a chat template uses; None: none."""
    for mark, name in (("</think>", "qwen3"), ("[/THINK]", "mistral")):
        if mark in template:
            return name
    return None
