"""torch's elastic agent with extra environment variables for its workers."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest


class _WorkerFiles(DefaultLogsSpecs):
    """torch's log files, and a hook: the agent calls ``reify`` at each start, with the workers' environments."""

    def __init__(self, environment: Mapping[str, str], log_dir: str | None) -> None:
        super().__init__(log_dir=log_dir)
        self._environment = dict(environment)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for own in envs.values():
            for name, value in self._environment.items():
                own.setdefault(name, value)  # the agent's own variables, such as RANK, take precedence
        return super().reify(envs)


class DSElasticAgent(LocalElasticAgent):
    """Starts the workers of one node, monitors them, and restarts them with a new world size when nodes leave or join,
    within the bounds of the rendezvous of ``spec``.

    Args:
        spec: entry point, workers per node, and rendezvous.
        env: environment variables of every worker, in addition to this process's own; the agent sets RANK, WORLD_SIZE
            and the like.
        start_method: multiprocessing start method of a worker that is a Python function: "spawn", "fork" or
            "forkserver".
        exit_barrier_timeout: seconds that a finished node waits for the others.
        log_dir: folder for the workers' files; a temporary one if None.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        env: Mapping[str, str],
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_dir: str | None = None,
    ) -> None:
        super().__init__(spec, _WorkerFiles(env, log_dir), start_method, exit_barrier_timeout)
        self.ds_env = dict(env)
