"""Options of ``ds serve``. Help and mistakes in them cost no import of torch."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKEN_VARIABLE = "DS_SERVE_TOKEN"
"""Environment variable with the API key of `ds serve`."""

TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "qwen3_coder", "qwen3_xml")
REASONING_PARSERS = ("deepseek_r1", "mistral", "qwen3")


class _Parser(argparse.ArgumentParser):
    """The options of a file that ``--config`` names are the defaults of the others."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        file = first.parse_known_args(args)[0].config
        if file is not None:
            try:
                self.set_defaults(**_from_file(file))
            except (OSError, ValueError) as problem:
                self.error(f"--config {file}: {problem}")
        found = super().parse_args(args, namespace)
        if found.model is None:
            self.error("the following arguments are required: model")
        return found


def _from_file(path: str) -> dict[str, Any]:
    """The values of the options in a file of YAML or JSON, checked as on the command line, by their destinations."""
    given, alone = _mapping_in(path), parser()
    options = {name.lstrip("-") for name in alone._option_string_actions}
    arguments = [str(given.pop("model"))] if "model" in given else []
    for key, value in given.items():
        name = str(key).replace("_", "-")
        if name not in options or name in ("config", "help", "h"):
            close = difflib.get_close_matches(name, options, 1)
            raise ValueError(f"{key!r} is no option{f', did you mean {close[0]!r}?' if close else ''}")
        if isinstance(value, bool):
            arguments += [f"--{name}"] if value else [f"--no-{name}"] if f"no-{name}" in options else []
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments.append(f"--{name}={text}")
    for action in alone._actions:
        action.default = argparse.SUPPRESS
    return vars(alone.parse_known_args(arguments)[0])


def _mapping_in(path: str) -> dict[Any, Any]:
    text = Path(path).read_text(encoding="utf-8")
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
        raise ValueError("it holds no options: write lines such as `max-model-len: 4096`")
    return found


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="ds serve",
        description="Serve a Transformers model over HTTP, for clients of OpenAI's API.",
    )
    made.add_argument(
        "model", nargs="?", help="folder written by save_pretrained, or a model name on the hub"
    )
    made.add_argument(
        "--config",
        metavar="FILE",
        help="YAML or JSON with options by their names; the command line overrides it",
    )
    _model_options(made.add_argument_group("model"))
    _client_options(made.add_argument_group("address and clients"))
    _log_options(made.add_argument_group("logs and traces"))
    _limit_options(made.add_argument_group("scheduling and limits"))
    _cache_options(made.add_argument_group("key-value cache"))
    _chat_options(made.add_argument_group("chats"))
    made.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return made


def _model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", "--served-model-name", help="model name in responses (default: as given)")
    group.add_argument(
        "--dtype", default="bf16", help="dtype of the weights; auto: the folder's (default: %(default)s)"
    )
    group.add_argument(
        "--tp-size",
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        help="ranks that share each layer; start the server with `deepspeed`",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters of PEFT; requests choose one as their model",
    )
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="propose tokens that one forward verifies, which changes no answer: by a draft model of the same "
        'vocabulary {"model": folder, "num_speculative_tokens": 4}, or those that repeat earlier ones {"method": '
        '"ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}',
    )
    group.add_argument(
        "--pooling",
        choices=("last", "mean", "cls"),
        help="hidden states that /v1/embeddings returns: of the last token, the mean of all, or of the first (default: "
        "as in the folder's 1_Pooling/config.json, else last)",
    )
    group.add_argument("--seed", type=int, help="of requests that give none (default: drawn)")


def _client_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    group.add_argument(
        "--token",
        "--api-key",
        default=os.environ.get(TOKEN_VARIABLE) or None,
        help=f"API key that clients have to send (default: ${TOKEN_VARIABLE}); required if other hosts can connect",
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="further keys, a line for each: a name, and the key"
    )
    group.add_argument(
        "--requests-per-minute",
        type=_above_zero,
        metavar="N",
        help="of one client: of its key, or without keys of its address (default: any number)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins whose pages may ask from a browser (CORS), such as https://chat.example.com; *: any",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate in PEM's format: speak TLS")
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", help="its private key (default: in the file of the certificate)"
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30,
        help="time to finish answers after SIGTERM (default: %(default)s)",
    )


def _log_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--access-log", metavar="FILE", help="write a line per request; -: to standard error (default: none)"
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span per request there, by OpenTelemetry's protocol over HTTP",
    )


def _limit_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--token-budget",
        "--max-num-batched-tokens",
        type=int,
        default=512,
        help="tokens per forward (default: %(default)s)",
    )
    group.add_argument(
        "--short-share",
        type=float,
        default=0.5,
        help="fraction of the tokens for prompts that short prompts may use to overtake long ones; 0: serve in order "
        "of arrival (default: %(default)s)",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=["fcfs", "priority"],
        default="fcfs",
        help="fcfs: serve by arrival; priority: requests whose field `priority` is lower first (default: %(default)s)",
    )
    group.add_argument(
        "--max-sequences",
        "--max-num-seqs",
        type=int,
        default=64,
        help="most sequences served at a time (default: %(default)s)",
    )
    group.add_argument(
        "--max-requests", type=int, default=256, help="most requests served or waiting (default: %(default)s)"
    )
    group.add_argument(
        "--request-seconds",
        type=_above_zero,
        metavar="S",
        help="end a request that is not answered within so long with an error (default: never)",
    )
    group.add_argument(
        "--max-length",
        "--max-model-len",
        type=int,
        help="most tokens of prompt and answer together (default: the model's, up to 2048)",
    )
    group.add_argument(
        "--default-tokens",
        type=int,
        default=1024,
        help="most tokens of an answer if the request does not say (default: %(default)s)",
    )


def _cache_options(group: argparse._ArgumentGroup) -> None:
    sizes = group.add_mutually_exclusive_group()
    sizes.add_argument(
        "--cache-gb",
        type=float,
        help="size of the key-value cache (default: what fits in 0.4 of free memory)",
    )
    sizes.add_argument("--kv-cache-memory-bytes", type=int, help="the same, in bytes")
    sizes.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help="the same, as what is left of this fraction of the device's memory (of the machine's, without an "
        "accelerator) beside the weights and all else that is there",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share keys and values of prompts that begin alike (default: %(default)s)",
    )
    group.add_argument("--block-size", type=int, default=16, help="tokens per block of the cache")


def _chat_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chat-template", metavar="FILE", help="file with a chat template, or the template itself"
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="accept the field chat_template: a client's template may compute without end",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("none", *TOOL_CALL_PARSERS),
        help="how the model writes calls of tools (default: guessed from the chat template)",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="end with an error if it is not known how the model writes calls, instead of refusing requests with tools",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=("none", *REASONING_PARSERS),
        help="how the model writes reasoning (default: guessed from the chat template)",
    )


def _above_zero(text: str) -> float:
    """The type of an option that is a positive number."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value
