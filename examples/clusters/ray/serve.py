"""``ds serve`` as a deployment of Ray Serve: replicas, autoscaling by queue length, health and draining are Ray's.

`python examples/clusters/ray/serve.py ./my-model --replicas 1 4` deploys a model (`pip install "ray[serve]"`).
Options that are not listed by ``--help`` are those of ``ds serve``. A replica is a server of one process: Ray's proxy
takes the place of its listener, and sends each request to the less loaded of two replicas. An answer whose replica dies
after its first event ends with a broken connection, never as if it were whole; clients repeat those that had not begun.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from ray import serve

from deepspeed.tools import serve_options
from deepspeed.tools.serve import load, problem_of


def deployment_of(
    make: Callable[[], Any], *, replicas: tuple[int, int], ongoing: int, drain: float, gpus: float = 0
) -> Any:
    """Describe the replicas for `serve.run`.

    Args:
        make: returns what `deepspeed.tools.serve.load` does; called in each replica.
        replicas: the least and the most.
        ongoing: requests of one replica beyond which Ray starts another. A replica takes at most twice as many, and
            four times as many wait, before the proxy says 503.
        drain: seconds that answers have when a replica is taken away.
        gpus: of each replica.
    """

    @serve.deployment(
        autoscaling_config={
            "min_replicas": replicas[0],
            "max_replicas": replicas[1],
            "target_ongoing_requests": ongoing,
        },
        max_ongoing_requests=2 * ongoing,
        max_queued_requests=4 * ongoing,
        ray_actor_options={"num_gpus": gpus},
        graceful_shutdown_timeout_s=drain,
        health_check_period_s=2,
    )
    @serve.ingress()
    class Replica:
        def __init__(self) -> None:
            loaded = make()
            self.services, self._app = loaded.services.start(), loaded.app

        async def __serve_build_asgi_app__(self) -> Any:
            return self._app

        def check_health(self) -> None:
            """Raise if the generator has failed: Ray replaces the replica then."""
            if self.services.failure is not None:
                raise self.services.failure

        def __del__(self) -> None:
            """Ray calls it once the last answer has ended, or the time for it has passed."""
            self.services.close(drain=False)

    return Replica.bind()


def main(argv: Sequence[str] | None = None) -> None:
    """Deploy, and wait until Ctrl-C."""
    own = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    own.add_argument("--replicas", type=int, nargs=2, default=(1, 4), metavar=("LEAST", "MOST"))
    own.add_argument(
        "--ongoing", type=int, default=16, help="requests of a replica before another is started"
    )
    own.add_argument("--gpus", type=float, default=0, help="of each replica")
    own.add_argument("--port", type=int, default=8000)
    mine, rest = own.parse_known_args(argv)
    args = serve_options.parser().parse_args(rest)
    problem = problem_of(args)
    if problem is not None:
        own.error(problem)
    for option in ("ssl_certfile", "access_log", "otlp_traces_endpoint"):
        if getattr(args, option) is not None:
            own.error(
                f"--{option.replace('_', '-')} is for a server of its own: Ray's proxy hears the clients here"
            )
    if args.tp_size > 1:
        own.error("--tp-size: a replica is one process")
    serve.start(http_options={"host": args.host, "port": mine.port})
    deployment = deployment_of(
        lambda: load(args),
        replicas=mine.replicas,
        ongoing=mine.ongoing,
        drain=args.drain_seconds,
        gpus=mine.gpus,
    )
    serve.run(deployment, blocking=True)


if __name__ == "__main__":
    main()
