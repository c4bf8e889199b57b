"""``ds serve MODEL``: serve Transformers models over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from deepspeed.base.extras import install_hint
from deepspeed.base.logging import report
from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.inference.pretrained import classifier_in
from deepspeed.inference.scheduling.speculation import SpeculativeConfig
from deepspeed.inference.serving.clients import Certificate, RequestLog, access_log, trace
from deepspeed.inference.serving.pooling import pooling_of
from deepspeed.observe.live.access import check_token, is_local
from deepspeed.tools import serve_options
from deepspeed.tools.serve_loading import LoadedServer, clients_of, load

PACKAGES = {"fastapi": "serve", "uvicorn": "serve", "transformers": "transformers"}
MAIN_ENDPOINTS = ("/", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/metrics")


@exit_quietly("ds serve")
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns 2 for invalid or contradictory arguments."""
    args = serve_options.parser().parse_args(argv)
    problem = problem_of(args)
    if problem is not None:
        print(f"ds serve: {problem}", file=sys.stderr)
        return 2
    if int(os.environ.get("RANK", 0)):  # only rank 0 listens for clients
        return _load_and_serve(args)
    from deepspeed.inference.serving.listening import LoadingAnswers

    try:
        certificate = _certificate_of(args)
        loading = LoadingAnswers(args.host, args.port, certificate and certificate.context())
    except OSError as error:
        print(f"ds serve: --host {args.host} --port {args.port}: {error.strerror}", file=sys.stderr)
        return 2
    with contextlib.closing(loading):
        return _load_and_serve(args, loading)


def _load_and_serve(args: argparse.Namespace, loading: Any = None) -> int:
    """Load the models and serve them. ``loading``: answers clients during loading. Returns the exit status."""
    try:
        loaded = load(args)
    except (OSError, ValueError) as error:
        print(f"ds serve: {error}", file=sys.stderr)
        return 2
    if loaded.app is None:
        # The first rank finishes pending answers, and tells this one when to end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        loaded.services.follow()
        return 0
    return _listen(args, loaded, loading)


def _listen(args: argparse.Namespace, loaded: LoadedServer, loading: Any) -> int:
    """Listen for clients, on rank 0. Returns the exit status."""
    from deepspeed.inference.serving.app import endpoints
    from deepspeed.inference.serving.listening import make_listener

    app, services = loaded.app, loaded.services.start()
    signal.signal(signal.SIGTERM, _end)  # uvicorn raises it again when all connections are closed

    def ready(address: str) -> None:
        paths = endpoints(app)
        main = [path for path in MAIN_ENDPOINTS if path in paths]
        more = f"endpoints {', '.join(main)} and {len(paths) - len(main)} more"
        report(f"ds serve: ready at {address}: {loaded.summary}; {more}")

    try:
        if args.otlp_traces_endpoint is not None:
            trace(app, args.otlp_traces_endpoint, ",".join(one.name for one in args.each))
        log = None if args.access_log is None else access_log(args.access_log)
    except (OSError, ValueError) as problem:
        print(f"ds serve: {problem}", file=sys.stderr)
        services.close(drain=False)
        return 2
    listener = make_listener(
        RequestLog(app, log),
        services,
        host=args.host,
        port=args.port,
        drain_seconds=args.drain_seconds,
        ready=ready,
        certificate=_certificate_of(args),
    )
    # Loaded objects live until the end: without this, the collector would traverse them for a second after SIGTERM.
    gc.freeze()
    try:
        listener.run(loading and loading.hand_over())
    finally:
        services.close(timeout=args.drain_seconds)
    return 0 if services.failure is None else 1


def _certificate_of(args: argparse.Namespace) -> Certificate | None:
    return None if args.ssl_certfile is None else Certificate(args.ssl_certfile, args.ssl_keyfile)


def _end(*_: Any) -> None:
    raise SystemExit(0)


def problem_of(args: argparse.Namespace) -> str | None:
    """Return why a server with these options cannot be started; None: it can."""
    if not is_local(args.host) and not (args.token or args.api_key_file):
        return (
            f"--host {args.host} can be reached from other hosts: set --token or "
            f"${serve_options.TOKEN_VARIABLE}, or --api-key-file, so that only clients with a key are served"
        )
    try:
        clients_of(args)
    except (OSError, ValueError) as problem:
        return f"--api-key-file: {problem}"
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        return "--ssl-keyfile needs its certificate: set --ssl-certfile too"
    if (certificate := _certificate_of(args)) is not None:
        try:
            certificate.context()
        except OSError as problem:
            return f"--ssl-certfile {args.ssl_certfile}, --ssl-keyfile {args.ssl_keyfile}: {problem.strerror}"
    if args.token is not None:
        try:
            check_token(args.token, f"--token or ${serve_options.TOKEN_VARIABLE}")
        except ValueError as problem:
            return str(problem)
    if len(args.each) > 1 and args.tp_size > 1:
        return "--model: several models need one rank each: --tp-size 1"
    if len({one.name for one in args.each}) < len(args.each):
        names = ", ".join(one.name for one in args.each)
        return f"--model: the models need different names, not {names}: use --model name=folder"
    for one in args.each:
        try:
            if (problem := _problem_of_model(one)) is not None:
                return problem
        except (OSError, ValueError) as problem:
            return str(problem)
    missing = [each for each in PACKAGES.items() if each[0] not in sys.modules and find_spec(each[0]) is None]
    hints = [install_hint(package, extra=extra).removeprefix("pip install ") for package, extra in missing]
    extras = ",".join(dict.fromkeys(extra for _, extra in missing))
    names = ", ".join(package for package, _ in missing)
    return f"missing: {names} (extras {extras}): pip install {' '.join(hints)}" if missing else None


def _problem_of_model(args: argparse.Namespace) -> str | None:
    """Return why a model with these options cannot be loaded; None: it can. OSError, ValueError: likewise."""
    if args.lora_modules and args.tp_size > 1:
        return "--lora-modules needs a model on one rank: --tp-size 1"
    try:
        config = args.speculative_config and SpeculativeConfig.of(args.speculative_config)
        if config and config.model is not None and (kind := classifier_in(config.model)):
            raise ValueError(f"{config.model}: {kind} is a classifier and does not generate text")
    except (OSError, ValueError) as problem:
        return f"--speculative-config: {problem}"
    if not args.pooling:
        pooling_of(args.model)  # ValueError: the folder names an unsupported pooling
    if kind := classifier_in(args.model):
        if args.tp_size > 1:
            return f"{args.model}: {kind} runs on one rank only: --tp-size 1"
        for option in ("lora_modules", "speculative_config"):
            if getattr(args, option):
                return f"--{option.replace('_', '-')} is for generative models, not for {args.model}: {kind}"
    return None


if __name__ == "__main__":
    raise SystemExit(main())
