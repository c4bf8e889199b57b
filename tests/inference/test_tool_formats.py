"""Calls of tools and reasoning in answers, however the text is cut into pieces, and the grammars that force calls."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest

from deepspeed.inference.serving.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    grammar,
    guessed_reasoning_format,
    guessed_tool_format,
    tool_format,
)
from deepspeed.inference.serving.pieces import Parser, Piece

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}},
}
PARIS = '{"city": "Paris", "days": 3}'


def made(name: str, *, limit: int | None = None, reasoning: str = "", inside: bool = False) -> Parser:
    ids = itertools.count()
    readers: list[Any] = [REASONING_FORMATS[reasoning].reader(inside)] if reasoning else []
    if name:
        readers.append(lambda source: TOOL_FORMATS[name].read(source, TOOLS))
    return Parser(*readers, make_id=lambda: f"id{next(ids)}", limit=limit)


def joined(pieces: Iterable[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return text, reasoning and the calls, whose indices and ids must be in order."""
    text, reasoning, calls = "", "", list[list[str]]()
    for piece in pieces:
        if piece.kind == "call":
            assert piece.index == len(calls) and piece.id == f"id{piece.index}"
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.text
        elif piece.kind == "text":
            text += piece.text
        else:
            reasoning += piece.text
    return text, reasoning, [(name, arguments) for name, arguments in calls]


def parsed(text: str, name: str, cuts: Iterable[int] = (), **more: Any) -> Any:
    parser, found, places = made(name, **more), list[Piece](), [0, *cuts, len(text)]
    for begin, end in zip(places, places[1:], strict=False):
        found += parser.add(text[begin:end])
    found += parser.finish()
    return (*joined(found), parser.has_called)


CALLED = [("weather", PARIS)]
TWICE = [*CALLED, ("now", "{}")]
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
CASES: dict[str, tuple[str, str, str | None, list[tuple[str, str]], bool]] = {
    "one": ("hermes", HERMES, "", CALLED, True),
    "behind text": ("hermes", f" Let me see.\n\n{HERMES}\n", " Let me see.", CALLED, True),
    "two": ("hermes", f'{HERMES}\n<tool_call>{{"name": "now"}}</tool_call>', "", TWICE, True),
    "arguments first": (
        "hermes",
        f'<tool_call>{{"arguments": {PARIS}, "id": 3, "name": "weather"}}</tool_call>',
        "",
        CALLED,
        True,
    ),
    "arguments in a text": (
        "hermes",
        f'<tool_call>{{"name": "weather", "arguments": {json.dumps(PARIS)}}}</tool_call>',
        "",
        CALLED,
        True,
    ),
    "markers in a text": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>}\\"{"}}</tool_call>',
        "",
        [("weather", '{"city": "</tool_call>}\\"{"}')],
        True,
    ),
    "nested": ("hermes", f"<tool_call> {HERMES}", "<tool_call>", CALLED, True),
    "no call": ("hermes", "a < b <tool_cal> \n", "a < b <tool_cal> \n", [], False),
    "another tool": ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, [], False),
    "no JSON": ("hermes", "<tool_call>weather(Paris)</tool_call> x", None, [], False),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None, [], False),
    "arguments in a list": ("hermes", '<tool_call>{"name": "now", "arguments": [1]}', None, [], False),
    "unfinished name": ("hermes", '<tool_call>{"name": "wea', None, [], False),
    "unfinished": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Pa\\',
        "",
        [("weather", '{"city": "Pa\\')],
        False,
    ),
    "crossed brackets": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": [}, 1]}</tool_call>',
        "}, 1]}</tool_call>",
        [("weather", '{"city": [')],
        False,
    ),
    "llama": ("llama3_json", f'{{"name": "weather", "parameters": {PARIS}}}', "", CALLED, True),
    "llama, a tag and two": (
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS}}}; {{"name": "now"}}',
        "",
        TWICE,
        True,
    ),
    "llama, JSON": ("llama3_json", '\n{"name": "Bob", "age": 3} ', '\n{"name": "Bob", "age": 3} ', [], False),
    "llama, code": ("llama3_json", "<|python_tag|>print(3)", "<|python_tag|>print(3)", [], False),
    "llama, text": ("llama3_json", 'So: {"name": "now"}', 'So: {"name": "now"}', [], False),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        TWICE,
        True,
    ),
    "mistral, names": ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now{{}}", "", TWICE, True),
    "mistral, ids": ("mistral", f"Hm. [TOOL_CALLS]weather[CALL_ID]abc[ARGS]{PARIS}", "Hm.", CALLED, True),
    "mistral, a list": ("mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", [], False),
    "qwen": ("qwen3_coder", XML, "", CALLED, True),
    "qwen, two": ("qwen3_coder", f"Hm.\n{XML}\n<function=now>\n</function>", "Hm.", TWICE, True),
    "qwen, another tool": ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>", None, [], False),
    "qwen, unfinished": (
        "qwen3_coder",
        XML[: XML.index("3")],
        "",
        [("weather", '{"city": "Paris"')],
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_cut_an_answer(case: str) -> None:
    name, text, told, calls, called = CASES[case]
    wanted = (text if told is None else told, "", calls, called)
    assert parsed(text, name) == wanted
    assert parsed(text, name, range(1, len(text))) == wanted
    for at in range(1, len(text)):
        assert parsed(text, name, [at]) == wanted, text[:at]
        assert parsed(text, name, range(at, len(text), at)) == wanted


THOUGHT = "<think>\nIs it <tool_call>?\n</think>\n\n"


@pytest.mark.parametrize(
    "text, inside, told, reasoning",
    [
        (f"{THOUGHT}Yes. {HERMES}", False, "Yes.", "Is it <tool_call>?"),
        (f" {THOUGHT}{HERMES}", False, "", "Is it <tool_call>?"),
        (f"Hm. </think> Yes. {HERMES}", True, "Yes.", "Hm."),
        (f"Hm. </think> Yes. {HERMES}", False, "Hm. </think> Yes.", ""),
    ],
)
def test_reasoning_and_calls(text: str, inside: bool, told: str, reasoning: str) -> None:
    for at in range(1, len(text)):
        for cuts in ([at], range(at, len(text), at)):
            found = parsed(text, "hermes", cuts, reasoning="qwen3", inside=inside)
            assert found == (told, reasoning, CALLED, True)


def test_reasoning_alone() -> None:
    for text, told, reasoning in (
        ("Hi\n", "Hi\n", ""),
        ("<think>a</think>b ", "b ", "a"),
        ("<think>a</thin", "", "a</thin"),
        ("<think></think>b<think>c</think>", "b<think>c</think>", ""),
        ("", "", ""),
    ):
        for cuts in ((), range(1, len(text))):
            assert parsed(text, "", cuts, reasoning="qwen3") == (told, reasoning, [], False)
    form = REASONING_FORMATS["deepseek_r1"]
    assert form.begins_in("<assistant>") and form.begins_in("<think>\n")
    assert not form.begins_in("<think>\n\n</think>\n\n")
    assert [REASONING_FORMATS["qwen3"].begins_in(end) for end in ("<think>\n", "<a>")] == [True, False]


def test_no_more_than_one_call() -> None:
    """What follows it is not part of the answer, wherever the text is cut."""
    for name, text in (("hermes", f"Hm. {HERMES} {HERMES} x"), ("qwen3_coder", f"Hm. {XML}{XML}")):
        for at in range(1, len(text)):
            assert parsed(text, name, [at], limit=1) == ("Hm.", "", CALLED, True)
        parser = made(name, limit=1)
        for character in text:
            parser.add(character)
            if parser.is_complete:
                break
        assert parser.is_complete and character in "}>"


def test_a_call_without_an_end() -> None:
    """No other takes its place where one may be, and the model has not called where others follow it."""
    broken = '<tool_call>{"name": "weather", "arguments": {"city": [}} Hm.'
    unfinished = f"<tool_call><function=weather><parameter=city>\nParis\n</parameter> Hm. {XML}"
    for name, text, told in (
        ("hermes", f"{broken} {HERMES} {HERMES} x", ("}} Hm.", '{"city": [')),
        ("qwen3_coder", unfinished, ("Hm.", '{"city": "Paris"')),
    ):
        for at in range(1, len(text)):
            found = parsed(text, name, [at], limit=1)
            assert found == (told[0], "", [("weather", told[1])], False)
        calls, has_called = parsed(text, name)[2:]
        assert [each for _, each in calls] == [told[1]] + [PARIS] * text.count("3") and not has_called
        parser = made(name, limit=1)
        parser.add(text)
        assert parser.is_complete


def test_values_have_the_types_of_the_schema() -> None:
    schema = {
        "properties": {
            "text": {"type": "string"},
            "maybe": {"type": ["string", "null"]},
            "n": {"type": "integer"},
            "on": {"type": "boolean"},
            "list": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "part": {"$ref": "#/$defs/part"},
            "bad": {"type": "number"},
            "deep": {"anyOf": [{"type": ["integer", "null"]}]},
            "all": {"allOf": [{"description": "b"}, {"oneOf": [{"$ref": "#/$defs/n~1m"}]}]},
            "name": {"$ref": "#/$defs/name"},
            "enum": {"anyOf": [{"enum": [1, 2]}, {"type": "null"}]},
            "circle": {"$ref": "#/$defs/circle"},
            "nowhere": {"$ref": "#/$defs/none"},
        },
        "$defs": {
            "part": {"type": "object"},
            "n/m": {"type": "integer"},
            "name": {"type": "string"},
            "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "integer"}] * 100},
        },
    }
    given = {
        "text": "007",
        "maybe": "null",
        "n": "3",
        "on": "True",
        "list": "[1,\n2]",
        "part": '{"a": 1}',
        "bad": "NaN",
        "unknown": "12",
        "deep": "5",
        "all": "5",
        "name": "5",
        "enum": "2",
        "circle": "5",
        "nowhere": "[5]",
    }
    wanted = {
        **given,
        "maybe": None,
        "n": 3,
        "on": True,
        "list": [1, 2],
        "part": {"a": 1},
        "deep": 5,
        "all": 5,
        "enum": 2,
        "circle": 5,
        "nowhere": [5],
    }
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    parser = Parser(lambda source: TOOL_FORMATS["qwen3_coder"].read(source, {"f": schema}))
    found = parser.add(f"<tool_call><function=f>{inner}</function></tool_call>") + parser.finish()
    assert json.loads("".join(each.text for each in found if each.kind == "arguments")) == wanted


@pytest.mark.parametrize(
    "name, piece",
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": '),
        ("hermes", '{"a":'),
        ("hermes", "<tool_call>{" + " " * 50),
        ("hermes", "\n"),
        ("llama3_json", '{"name": {'),
        ("llama3_json", "<|python_tag|>{"),
        ("mistral", "[TOOL_CALLS]["),
        ("mistral", "[TOOL_CALLS]weather{"),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>"),
        ("qwen3_coder", "<function=now>"),
    ],
)
def test_time_grows_with_the_length(name: str, piece: str) -> None:
    """80,000 characters by fours: 1 s, on a busy machine too, unless a collection of garbage falls into it."""
    text = '<tool_call>{"name": "weather", "arguments": ' * (piece == '{"a":') + piece
    text += piece * (80_000 // len(piece))
    taken = []
    while len(taken) < 3 and min(taken, default=1.0) >= 1:
        began = time.process_time()
        parsed(text, name, range(4, len(text), 4))
        taken.append(time.process_time() - began)
    assert min(taken) < 1


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("many", [True, False])
def test_grammars_admit_what_is_read(name: str, many: bool) -> None:
    library = pytest.importorskip("llguidance", reason="the extra serve is not installed")
    form = TOOL_FORMATS[name]
    rules = grammar(form, TOOLS, many=many, specials={})
    matcher = library.LLMatcher(_bytes(library), library.LLMatcher.grammar_from_lark(rules), log_level=0)
    arguments = (
        ["<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n", ""]
        if form.as_xml
        else [PARIS, "{}"]
    )
    calls = [
        form.call[0].replace("{name}", tool) + given + form.call[1]
        for tool, given in zip(TOOLS, arguments, strict=True)
    ]
    for count in (1, 2):
        text = form.begin + form.between.join(calls[:count]) + form.end
        assert parsed(text, name)[2] == TWICE[:count]
        matcher.reset()
        taken = matcher.try_consume_tokens(list(text.encode()))
        assert (taken == len(text) and matcher.is_accepting()) == (many or count == 1)
    matcher.reset()
    assert matcher.try_consume_tokens(list(b"Sure")) == 0


@pytest.mark.parametrize("name", ["$defs", "definitions"])
def test_the_grammar_of_parameters_follows_references(name: str) -> None:
    library = pytest.importorskip("llguidance", reason="the extra serve is not installed")
    number = {"anyOf": [{"type": ["integer", "null"]}]}
    schema = {
        "properties": {"n": {"$ref": f"#/{name}/n"}, "s": {"type": "string", "enum": [1]}},
        "required": ["n", "s"],
        name: {"n": number},
    }
    form = TOOL_FORMATS["qwen3_coder"]
    rules = grammar(form, {"f": schema}, many=False, specials={})
    matcher = library.LLMatcher(_bytes(library), library.LLMatcher.grammar_from_lark(rules), log_level=0)
    before, after = (part.replace("{name}", "f") for part in form.call)
    for value, admitted in (("5", True), ("five", False)):
        text = before + f"<parameter=n>\n{value}\n</parameter>\n<parameter=s>\na\n</parameter>\n" + after
        matcher.reset()
        taken = matcher.try_consume_tokens(list(text.encode()))
        assert (taken == len(text) and matcher.is_accepting()) == admitted


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_forced_call_between_special_tokens(name: str) -> None:
    library = pytest.importorskip("llguidance", reason="the extra serve is not installed")
    form, specials = TOOL_FORMATS[name], {"<tool_call>": 257, "</tool_call>": 258}
    rules = grammar(form, TOOLS, many=False, specials=specials)
    matcher = library.LLMatcher(_bytes(library), library.LLMatcher.grammar_from_lark(rules), log_level=0)
    text = HERMES if name == "hermes" else XML
    assert matcher.try_consume_tokens(list(text.encode())) == 0
    matcher.reset()
    inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    tokens = [257, *inner.encode(), 258]
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _bytes(library: Any) -> Any:
    """Each byte is a token, and three are special."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra serve is not installed")
    letters = list(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    by_byte = {tokenizers.decoders.ByteLevel().decode([letter]): letter for letter in letters}
    vocabulary = {by_byte.get(chr(byte), f"<{byte}>"): byte for byte in range(256)}
    known = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    known.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    known.decoder = tokenizers.decoders.ByteLevel()
    known.add_special_tokens(["<end>", "<tool_call>", "</tool_call>"])
    return library.LLTokenizer(known.to_str(), n_vocab=260, eos_token=[256])


def test_markers_that_are_special_tokens() -> None:
    old, new = tool_format("mistral"), tool_format("mistral", ["[TOOL_CALLS]", "[ARGS]"])
    assert '<[5]> "["' in grammar(old, {"now": {}}, many=True, specials={"[TOOL_CALLS]": 5})
    rules = grammar(new, {"now": {}}, many=False, specials={"[TOOL_CALLS]": 5, "[ARGS]": 6})
    assert 'call_0: <[5]> "now" <[6]> with_0' in rules
    assert len(old.make_id()) == 9 and old.make_id().isalnum()


def test_what_a_template_says() -> None:
    for template, tool, reasoning in (
        ("{{ tools | tojson }} <tool_call> {{ name }} </think>", "hermes", "qwen3"),
        ("{% if tools %}<tool_call><function=f><parameter=x>", "qwen3_coder", None),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS] [/THINK]", "mistral", "mistral"),
        ('{% if tools %}{"name": f, "parameters": d}', "llama3_json", None),
        ("{% for each in messages %}{{ each.content }}{% endfor %}", None, None),
    ):
        assert guessed_tool_format(template) == tool
        assert guessed_reasoning_format(template) == reasoning
