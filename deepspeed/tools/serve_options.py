"""Options of ``ds serve``. Help and argument errors do not import torch."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.base.tool_arguments import add_options, takes
from deepspeed.tools.parsers import positive_number

TOKEN_VARIABLE = "DS_SERVE_TOKEN"
"""Environment variable with the API key of `ds serve`."""

TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "qwen3_coder", "qwen3_xml")
REASONING_PARSERS = ("deepseek_r1", "mistral", "qwen3")


class _Parser(argparse.ArgumentParser):
    """Takes defaults from the file that ``--config`` names."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        found = super().parse_args(args, namespace)
        if found.config is not None:
            try:
                given = _values_of(_mapping_in(found.config))
            except (OSError, ValueError) as problem:
                self.error(f"--config {found.config}: {problem}")
            on_command_line = vars(_given_by(args)).keys()
            for alternatives in (_SIZES, {"model", "models"}):
                if on_command_line & alternatives:
                    given = {name: value for name, value in given.items() if name not in alternatives}
            self.set_defaults(**given)
            found = super().parse_args(args, namespace)
        if found.model is None and not found.models:
            self.error("the following arguments are required: model")
        try:
            found.each = _each_of(found)
        except ValueError as problem:
            self.error(str(problem))
        found.model, found.name = found.each[0].model, found.each[0].name
        return found


def _each_of(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the options of each model. Options of a model apply to the first one; all others apply to every model, and
    a model's own options override them. Cache sizes are totals, except in a model's own options. ValueError:
    ``--model`` has something other than options of a model."""
    given: list[dict[str, Any]] = [] if args.model is None else [{"model": args.model}]
    given += map(_options_of_model, args.models)
    made, defaults = [], parser()
    for own in given:
        one = argparse.Namespace(**vars(args))
        for name in _SIZES if not made else (*_SIZES, *_OF_FIRST):
            setattr(one, name, defaults.get_default(name))
        vars(one).update(own)
        made.append(one)
    folders = [Path(one.model).resolve().name for one in made]
    adapters = (adapter_options(entry) for one in made for entry in one.lora_modules)
    taken = {*(one.name for one in made), *(each["name"] for each in adapters)}
    for one, folder in zip(made, folders, strict=True):  # the path stays a name, too: ``ServedModel.path``
        alone = Path(one.model).is_dir() and folders.count(folder) == 1 and folder not in taken
        one.name = one.name or (folder if alone else one.model)
    return made


def _options_of_model(text: str) -> dict[str, Any]:
    """Read ``[name=]folder``, or a JSON object of options. ValueError: it is invalid, or has options of the server."""
    if not text.startswith("{"):
        name, separator, folder = text.partition("=")
        return {"name": name, "model": folder} if separator and not Path(text).exists() else {"model": text}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--model {text} is not JSON: {error}") from None
    try:
        values = _values_of(given)
    except ValueError as error:
        raise ValueError(f"--model {error}") from None
    if "model" not in values:
        raise ValueError(f"--model {text}: 'model' is missing (the folder or the name on the hub)")
    if others := values.keys() - _OF_ONE:
        option = min(others).replace("_", "-")
        raise ValueError(f"--model {text}: {option!r} applies to all models of a server: set it outside")
    return values


def adapter_options(entry: str) -> dict[str, Any]:
    """Return "name", "path" and "base_model_name" (or None) of an adapter: ``name=folder``, or a JSON object.
    ValueError: it is neither."""
    name, separator, folder = entry.partition("=")
    try:
        given = json.loads(entry) if entry[:1] == "{" else {"name": name, "path": folder} if separator else {}
        return {"base_model_name": None, **given, "name": given["name"], "path": given["path"]}
    except (ValueError, LookupError):
        raise ValueError(
            f"--lora-modules: {entry!r}: expected name=folder, or an object with 'name' and 'path'"
        ) from None


def _given_by(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse only the options in ``args``, without defaults."""
    alone = parser()
    for action in alone._actions:
        action.default = argparse.SUPPRESS
    return alone.parse_known_args(args)[0]


def _values_of(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Map options by command-line name to values by destination. ValueError: an unknown option, or a missing value."""
    options = {name.removeprefix("--"): action for name, action in parser()._option_string_actions.items()}
    known = [name for name in options if name[0] != "-" and name not in ("config", "help", "local_rank")]
    arguments = []
    for key, value in given.items():
        name = str(key).replace("_", "-")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"{key!r} is not an option{f', did you mean {close[0]!r}?' if close else ''}")
        several = name == "model" or options[name].nargs == "+"
        if value is None or (isinstance(value, list) and not (several and value)):
            raise ValueError(f"{key!r} is {json.dumps(value)}: set a value, or leave it out")
        if name == "model" and not isinstance(value, (dict, list)):
            arguments.insert(0, str(value))
        elif isinstance(value, bool):
            arguments += [f"--{name}"] if value else [f"--no-{name}"] if f"no-{name}" in options else []
        elif isinstance(value, list) and name != "model":
            arguments += [f"--{name}", *map(_text_of, value)]
        else:
            each_of = value if isinstance(value, list) else [value]
            arguments += [f"--{name}={_text_of(each)}" for each in each_of]
    return vars(_given_by(arguments))


def _text_of(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _mapping_in(path: str) -> dict[Any, Any]:
    text = _read(path)
    try:
        import yaml
    except ImportError:
        found = json.loads(text)
    else:
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(found, dict):
        raise ValueError("it contains no options: write lines such as `max-model-len: 4096`")
    return found


def _read(path: str) -> str:
    """Read a file. A pipe is read only once: both `ds` and the server parse the options."""
    if Path(path).is_file():
        return Path(path).read_text(encoding="utf-8")
    return _text_of_pipe(path)


@functools.cache
def _text_of_pipe(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


_MODEL = {
    "--model NAME=FOLDER": takes(
        "an additional model, selected in requests by its name (default: that of the folder); or an object with its "
        'options, which override the common ones: {"name": "small", "model": folder, "dtype": "fp32", "cache-gb": 2}',
        [],
        action="append",
        dest="models",
    ),
    "--name --served-model-name": takes(
        "model name in requests and responses (default: that of the folder, or as given)"
    ),
    "--dtype": takes("dtype of the weights, or int8; auto: the folder's (default: %(default)s)", "bf16"),
    "--quantization -q": takes("how weights are stored, such as gptq (default: as in the folder's config)"),
    "--tp-size --tensor-parallel-size -tp": takes(
        "ranks that share each layer; start the server with `deepspeed`", 1
    ),
    "--lora-modules NAME=FOLDER": takes(
        'PEFT adapters, selected in requests as the model; or {"name": ..., "path": folder, "base_model_name": '
        "...}",
        [],
        nargs="+",
    ),
    "--speculative-config JSON": takes(
        "propose tokens for one forward to verify, without changing answers: from a draft model with the same "
        'vocabulary {"model": folder, "num_speculative_tokens": 4}, or from repeated text {"method": '
        '"ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}'
    ),
    "--pooling": takes(
        "hidden state that /v1/embeddings returns: of the last token, the mean, or of the first token "
        "(default: as in the folder's 1_Pooling/config.json, else last)",
        choices=("last", "mean", "cls"),
    ),
    "--seed": takes("for requests without a seed (default: random)", type=int),
}
_ADDRESS = {
    "--host": takes("address to listen on (default: %(default)s)", "127.0.0.1"),
    "--port": takes("port to listen on (default: %(default)s)", 8000),
}
_CLIENTS = {
    "--api-key-file FILE": takes("file with additional keys, one line each: a name and the key"),
    "--requests-per-minute N": takes(
        "limit per client: by key, or by address without keys (default: none)",
        type=positive_number,
    ),
    "--allowed-origins ORIGIN": takes(
        "origins allowed for browsers (CORS), such as https://chat.example.com; *: any",
        [],
        nargs="+",
    ),
    "--ssl-certfile FILE": takes("certificate in PEM format: enables TLS"),
    "--ssl-keyfile FILE": takes("its private key (default: in the certificate file)"),
    "--drain-seconds": takes("time to finish answers after SIGTERM (default: %(default)s)", 30, type=float),
}
_LOGS = {
    "--access-log FILE": takes("log a line per request to this file; -: to standard error (default: none)"),
    "--otlp-traces-endpoint URL": takes("send a span per request there, by OTLP over HTTP"),
}
_LIMITS = {
    "--token-budget --max-num-batched-tokens": takes(
        "tokens per forward (default: 512, on CPUs 128 if the model generates; at least twice --max-sequences)",
        type=int,
    ),
    "--short-share": takes(
        "fraction of the prompt tokens that short prompts may use to overtake long ones; 0: in order of "
        "arrival (default: %(default)s)",
        0.5,
    ),
    "--scheduling-policy": takes(
        "fcfs: in order of arrival; priority: lowest `priority` field first (default: %(default)s)",
        "fcfs",
        choices=["fcfs", "priority"],
    ),
    "--max-sequences --max-num-seqs": takes("maximum concurrent sequences (default: %(default)s)", 64),
    "--max-requests": takes("maximum requests running or waiting (default: %(default)s)", 256),
    "--request-seconds S": takes(
        "fail a request that takes longer than this (default: never)",
        type=positive_number,
    ),
    "--max-length --max-model-len": takes(
        "maximum tokens of prompt plus answer (default: the model's, up to 2048)", type=int
    ),
    "--default-tokens": takes(
        "maximum tokens of an answer if the request sets none (default: %(default)s)", 1024
    ),
}
_CACHE_SIZES = {
    "--cache-gb": takes("size of the key-value cache (default: what fits in 0.4 of free memory)", type=float),
    "--kv-cache-memory-bytes": takes("the same, in bytes", type=int),
    "--gpu-memory-utilization": takes(
        "the same, as the rest of this fraction of device memory (host memory without an accelerator) after "
        "weights and everything else in use",
        type=float,
    ),
}
_CACHE = {
    "--enable-prefix-caching": takes(
        "reuse keys and values of common prompt prefixes (default: %(default)s)",
        True,
        action=argparse.BooleanOptionalAction,
    ),
    "--block-size": takes("tokens per block of the cache", 16),
    "--cache-share": takes(
        "with several models: share of the cache memory for the first, where the others get 1 each; can "
        "also be set per model (default: %(default)s)",
        1.0,
        type=positive_number,
    ),
}
_CHATS = {
    "--chat-template FILE": takes("file with a chat template, or the template itself"),
    "--trust-request-chat-template": "accept the field chat_template: a client's template may run forever",
    "--tool-call-parser": takes(
        "format of the model's tool calls (default: guessed from the chat template)",
        choices=("none", *TOOL_CALL_PARSERS),
    ),
    "--enable-auto-tool-choice": "exit if the tool-call format is unknown, instead of rejecting requests with tools",
    "--reasoning-parser": takes(
        "format of the model's reasoning (default: guessed from the chat template)",
        choices=("none", *REASONING_PARSERS),
    ),
}


def _destinations(*tables: Mapping[str, Any]) -> set[str]:
    return {words.split()[0].lstrip("-").replace("-", "_") for table in tables for words in table}


_SIZES = frozenset(_destinations(_CACHE_SIZES))
"""Options of which only one takes effect."""
_OF_FIRST = {*_destinations(_MODEL, _CHATS), "cache_share"} - {"dtype", "tp_size", "seed"}
"""Options that apply only to the first model."""
_OF_ONE = _destinations(_MODEL, _LIMITS, _CACHE_SIZES, _CACHE, _CHATS) - {"tp_size", "gpu_memory_utilization"}
"""Options that a model may set for itself."""


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="ds serve",
        usage="ds serve [options] model",
        description="Serve Transformers models over HTTP, for clients of OpenAI's API.",
        epilog="example: ds serve ./my-model --port 8000 --max-length 4096",
    )
    made.add_argument(
        "model", nargs="?", help="folder written by save_pretrained, or a model name on the hub"
    )
    token = takes(
        f"API key that clients must send (default: ${TOKEN_VARIABLE}); required if other hosts can connect",
        os.environ.get(TOKEN_VARIABLE) or None,
    )
    clients = {**_ADDRESS, "--token --api-key": token, **_CLIENTS}
    file = "YAML or JSON file with options by name; the command line takes precedence"
    add_options(made, {"--config FILE": takes(file), "--local_rank": takes(argparse.SUPPRESS, -1)})
    add_options(made.add_argument_group("model"), _MODEL)
    add_options(made.add_argument_group("address and clients"), clients)
    add_options(made.add_argument_group("logs and traces"), _LOGS)
    add_options(made.add_argument_group("scheduling and limits"), _LIMITS)
    cache = made.add_argument_group("key-value cache")
    add_options(cache.add_mutually_exclusive_group(), _CACHE_SIZES)
    add_options(cache, _CACHE)
    add_options(made.add_argument_group("chats"), _CHATS)
    return made
