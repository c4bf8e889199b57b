"""Tools and reasoning of a request: fields, messages of the history, and parsing of answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.inference.scheduling.requests import Constraint
from deepspeed.inference.serving.bodies import JsonBudget, RequestError, kind_of, parsed
from deepspeed.inference.serving.formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    ToolFormat,
    grammar,
    tool_format,
)
from deepspeed.inference.serving.pieces import Parser
from deepspeed.inference.serving.tool_schemas import check_schema

_MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request. ``given``: as the client sent them, for the template; ``callable``: callable functions with
    the schemas of their arguments; ``is_forced``: a call is required; ``many``: several calls are allowed."""

    given: tuple[Mapping[str, Any], ...] = ()
    callable: Mapping[str, Mapping[str, Any]] | None = None
    is_forced: bool = False
    many: bool = True


def tools_of(request: Any) -> ToolUse:
    """Return the tools of a request. RequestError: malformed, or ``tool_choice`` names an unknown function."""
    given, choice = request.tools, request.tool_choice
    if not given:
        if choice != "auto":
            raise RequestError("tool_choice needs tools", "tool_choice")
        return ToolUse()
    if not isinstance(given, list) or len(given) > _MAX_TOOLS:
        raise RequestError(f"tools: expected a list of up to {_MAX_TOOLS} functions", "tools")
    known: dict[str, Mapping[str, Any]] = {}
    for place, tool in enumerate(given):
        name, schema = _function(tool, f"tools.{place}")
        if name in known:
            raise RequestError(f"tools.{place}: duplicate function {name!r}", f"tools.{place}")
        known[name] = schema
    if choice == "none":
        return ToolUse()
    if isinstance(choice, str):
        if choice not in _CHOICES:
            allowed = f"{', '.join(_CHOICES)} or an object with a function"
            raise RequestError(f"tool_choice: expected {allowed}", "tool_choice")
        return ToolUse(tuple(given), known, choice == "required", request.parallel_tool_calls)
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict):
        raise RequestError("tool_choice.function is missing", "tool_choice")
    name = function.get("name")
    if name not in known:
        raise RequestError("tool_choice is not one of the functions in tools", "tool_choice")
    return ToolUse(tuple(given), {name: known[name]}, is_forced=True, many=False)


def _function(tool: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """Return a function's name and the schema of its arguments."""
    function = (
        tool.get("function")
        if isinstance(tool, dict) and tool.get("type", "function") == "function"
        else None
    )
    if not isinstance(function, dict):
        raise RequestError(f"{where}: expected an object of type 'function' with a function", where)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        where = f"{where}.function.name"
        raise RequestError(f"{where}: expected 1 to 128 letters, digits and any of _ . : / -", where)
    if schema is None:
        schema = {"type": "object", "properties": {}}
    where = f"{where}.function.parameters"
    if not isinstance(schema, dict):
        raise RequestError(f"{where}: expected the JSON schema of an object", where)
    check_schema(schema, where)
    return name, schema


def with_calls(message: dict[str, Any], where: str, budget: JsonBudget) -> dict[str, Any]:
    """Return a message of the history in the form that templates read: call arguments as objects where they parse as
    such, and reasoning under both of its names. ``budget``: for the arguments of all calls. RequestError: the calls are
    malformed, or exceed the budget."""
    thought, calls = message.get("reasoning_content") or message.get("reasoning"), message.get("tool_calls")
    if isinstance(thought, str):
        message = {**message, "reasoning_content": thought, "reasoning": thought}
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, list):
        raise RequestError(
            f"{where}.tool_calls: expected a list, not {kind_of(calls)}", f"{where}.tool_calls"
        )
    return {
        **message,
        "tool_calls": [_past(each, f"{where}.tool_calls.{at}", budget) for at, each in enumerate(calls)],
    }


def _past(call: Any, where: str, budget: JsonBudget) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected an object with a function and its name", where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            read = parsed(arguments.encode(), budget, f"{where}.function.arguments")
        except RequestError:
            raise
        except ValueError:
            read = None  # a model that was cut short wrote incomplete JSON
        arguments = read if isinstance(read, dict) else arguments
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of a server's model. ``tools``, ``reasoning``: names in `formats.py`; None: unsupported."""

    tools: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Formats of the answers to one request: of calls in ``tools``, of reasoning in ``reasoning``. ``inside``: answers
    start within reasoning."""

    use: ToolUse
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    inside: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the special tokens that the parser must see."""
        calls = () if self.tools is None else self.tools.specials
        return calls if self.reasoning is None else (*calls, self.reasoning.begin, self.reasoning.end)

    def parser(self) -> Parser | None:
        """Make a parser for one answer; None: it is plain text."""
        form, known, readers = self.tools, self.use.callable, []
        if self.reasoning is not None:
            readers.append(self.reasoning.reader(self.inside))
        if form is None or known is None:
            return Parser(*readers) if readers else None
        readers.append(lambda source: form.read(source, known))
        return Parser(*readers, make_id=form.make_id, limit=None if self.use.many else 1)

    def constraint(self, given: Constraint | None, specials: Mapping[str, int]) -> Constraint | None:
        """Return the grammar of the answers, after any reasoning: of the calls if forced, else ``given``. RequestError:
        both are asked for."""
        if self.use.is_forced and self.tools is not None and self.use.callable:
            if given is not None:
                raise RequestError("a tool call cannot be combined with another grammar", "tool_choice")
            rules = grammar(self.tools, self.use.callable, many=self.use.many, specials=specials)
            given = Constraint("grammar", rules)
        if given is None or self.reasoning is None:
            return given
        return replace(given, reasoning=("" if self.inside else self.reasoning.begin, self.reasoning.end))


def answer_form(
    formats: Formats, use: ToolUse, end: str, specials: Sequence[str], begun: str = ""
) -> AnswerForm:
    """Return the formats of answers. ``end``: of the prompt; ``specials``: texts of special tokens; ``begun``: the
    partial message that answers continue. RequestError: there are tools, but the model's call format is unknown."""
    name = formats.tools
    if use.callable and name is None:
        if not use.is_forced:
            raise RequestError(
                "tools: the tool-call format of this model is unknown: start the server with "
                "--tool-call-parser, or force a call with tool_choice",
                "tools",
            )
        name = "llama3_json"  # plain JSON, enforced by the grammar
    form = tool_format(name, specials) if use.callable and name is not None else None
    return AnswerForm(use, form, *_reasoning(formats.reasoning, end, begun))


def _reasoning(name: str | None, end: str, begun: str) -> tuple[ReasoningFormat | None, bool]:
    """Return the reasoning format, None if an answer has no reasoning, and whether the answer starts within it."""
    if name is None:
        return None, False
    form = REASONING_FORMATS[name]
    if begun.strip():  # the state follows from the partial message, not from the end of the prompt
        inside = form.ends_inside(begun)
        return (form if inside else None), inside
    if end.rstrip().endswith(form.end):
        return None, False
    return form, form.begins_in(end)
