"""torch's elastic agent with an environment for its workers."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest


class _WorkerFiles(DefaultLogsSpecs):
    """torch's log files; it is also asked once for each start of the workers, with their environments."""

    def __init__(self, environment: Mapping[str, str], log_dir: str | None) -> None:
        super().__init__(log_dir=log_dir)
        self._environment = dict(environment)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for own in envs.values():
            for name, value in self._environment.items():
                own.setdefault(name, value)  # what the agent has decided, such as RANK, stays
        return super().reify(envs)


class DSElasticAgent(LocalElasticAgent):
    """Starts the workers of one node, monitors them, and starts them anew, as a world of another size, when nodes leave
    or join; the rendezvous of ``spec`` says within which bounds.

    Args:
        spec: what to run, how many workers per node, and where the nodes meet.
        env: environment variables of every worker, beside this process's own; RANK, WORLD_SIZE and the like are the
            agent's.
        start_method: how a worker that is a Python function starts: "spawn", "fork" or "forkserver".
        exit_barrier_timeout: seconds that a node which is done waits for the others.
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
