"""Elastic jobs: the supervision of `deepspeed.tools.launcher.agent`, with restarts after the loss of ranks.

When a rank fails, the others are stopped and all are restarted: as many as before or, over several machines, as many
as are left. When a machine joins, the ranks are restarted after the current step. Between restarts the training
state lies in a shared-memory folder that this process owns (`deepspeed.checkpoint.replicas` writes it), or in
checkpoints on disk.

A job that fails before its first step is not restarted: its script is wrong. Nor is one that fails three times
without finishing a step in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousHandler

from deepspeed.base.constants import STOP_GRACE_FILE, TIME_IS_UP
from deepspeed.tools.launcher import agent
from deepspeed.tools.launcher.agent import NodeJob, Supervisor
from deepspeed.tools.launcher.errors import logger
from deepspeed.tools.launcher.failures import show
from deepspeed.tools.launcher.processes import NO_STEP, ElasticMemory, elastic_memory, kill_descendants
from deepspeed.tools.launcher.shim import FIRST_FAILURE

FRUITLESS_STARTS = 3  # in a row, without finishing a step: limit that ends a hopeless job
FRUITLESS_STARTS_OF_OTHERS = 12  # likewise, if each time the cause was on another machine
RESTARTS = 1000  # in total


class ElasticSupervisor(Supervisor):
    """Restarts the ranks as long as the job makes progress."""

    def __init__(
        self, job: NodeJob, run_dir: Path, memory: ElasticMemory, rendezvous: RendezvousHandler | None = None
    ) -> None:
        super().__init__(job, run_dir, rendezvous, max_restarts=RESTARTS)
        self.job = job
        self.memory = memory
        self.step_at_start = memory.step
        self.fruitless_starts = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            if self._should_restart(result):
                self._log_restart(result)
            else:
                self._remaining_restarts = 0
        return result

    def _should_restart(self, result: RunResult) -> bool:
        if not result.failures:  # a rank hangs in the kernel and could not be killed
            return False
        first, step = self.failures(result)[0], self.memory.step
        self.fruitless_starts = 0 if step > self.step_at_start else self.fruitless_starts + 1
        if first.exit_code == TIME_IS_UP:
            return False
        if first.lost_peer and self.job.nodes > 1:  # the cause is on another machine, whose agent decides
            return self.fruitless_starts < FRUITLESS_STARTS_OF_OTHERS
        return step > NO_STEP and self.fruitless_starts < FRUITLESS_STARTS

    def _log_restart(self, result: RunResult) -> None:
        job = self.job
        show(job.script, self.failures(result), log_dir=job.log_dir, adds_local_rank=False)
        logger.warning("the ranks are restarted after step %d", self.memory.step)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:
            logger.warning("machines joined or left: the ranks are restarted after step %d", self.memory.step)
        (self.run_dir / STOP_GRACE_FILE).unlink(missing_ok=True)  # no grace needed: the state is saved
        self._stop_workers(worker_group)  # pyright: ignore[reportCallIssue]
        kill_descendants()
        self._forget_failures()
        super()._restart_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _forget_failures(self) -> None:
        """Clear the records of this start's failures, so that the next start begins without any."""
        self.stopped_at = None
        self.step_at_start = self.memory.step
        (self.run_dir / FIRST_FAILURE).unlink(missing_ok=True)
        for report in self.run_dir.glob("*/*.json"):
            report.unlink()


def supervise(job: NodeJob) -> int:
    """Supervise an elastic job: the counterpart of `deepspeed.tools.launcher.agent.supervise`."""
    with elastic_memory() as memory:

        def make(job: NodeJob, run_dir: Path) -> Supervisor:
            rendezvous: Any = None
            if job.nodes > 1:
                from deepspeed.tools.launcher.rendezvous import meet

                rendezvous = meet(job, memory)
            return ElasticSupervisor(job, run_dir, memory, rendezvous)

        return agent.supervise(job, make)
