"""Elastic jobs: what `deepspeed.tools.launcher.agent` adds where a job goes on after it has lost ranks.

When a rank fails, the others are stopped and all are started again, as many as before or, over several machines, as
many as are left; when a machine comes, they are started anew after the step that is under way. Between two starts
the state of the run lies in a folder of shared memory, which belongs to this process
(`deepspeed.checkpoint.replicas` writes it), or in checkpoints on disk.

A job that fails before its first step is not started again: its script is wrong. Nor is one that fails three times
without a finished step in between.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousHandler

from deepspeed.base.constants import STOP_GRACE_FILE, TIME_IS_UP
from deepspeed.tools.launcher import agent
from deepspeed.tools.launcher.agent import NodeJob, Supervisor
from deepspeed.tools.launcher.failures import show
from deepspeed.tools.launcher.memory import NO_STEP, Memory, memory
from deepspeed.tools.launcher.processes import kill_descendants
from deepspeed.tools.launcher.shim import FIRST_FAILURE

logger = logging.getLogger("deepspeed.tools.launcher")

STARTS_IN_VAIN, STARTS_IN_VAIN_OF_OTHERS = 3, 12
RESTARTS = 1000  # in all; what ends a hopeless job is STARTS_IN_VAIN


class ElasticSupervisor(Supervisor):
    """Starts the ranks again as long as that gets the job on."""

    def __init__(
        self, job: NodeJob, run_dir: Path, kept: Memory, rendezvous: RendezvousHandler | None = None
    ) -> None:
        super().__init__(job, run_dir, rendezvous, max_restarts=RESTARTS)
        self.job = job
        self.kept = kept
        self.step_at_start = kept.step
        self.in_vain = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            if self._is_worth_a_start(result):
                self._notify(result)
            else:
                self._remaining_restarts = 0
        return result

    def _is_worth_a_start(self, result: RunResult) -> bool:
        if not result.failures:  # a rank hangs in the kernel: it could not be ended
            return False
        first, step = self.failures(result)[0], self.kept.step
        self.in_vain = 0 if step > self.step_at_start else self.in_vain + 1
        if first.exit_code == TIME_IS_UP:
            return False
        if first.lost_peer and self.job.nodes > 1:  # the machine of that peer decides
            return self.in_vain < STARTS_IN_VAIN_OF_OTHERS
        return step > NO_STEP and self.in_vain < STARTS_IN_VAIN

    def _notify(self, result: RunResult) -> None:
        job = self.job
        show(job.script, self.failures(result), log_dir=job.log_dir, adds_local_rank=False)
        logger.warning("the ranks are restarted after step %d", self.kept.step)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:
            logger.warning("machines joined or left: the ranks are restarted after step %d", self.kept.step)
        (self.run_dir / STOP_GRACE_FILE).unlink(missing_ok=True)  # their state is kept already
        self._stop_workers(worker_group)  # pyright: ignore[reportCallIssue]
        kill_descendants()
        self._forget_failures()
        super()._restart_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _forget_failures(self) -> None:
        """The next start has failures of its own."""
        self.stopped_at = None
        self.step_at_start = self.kept.step
        (self.run_dir / FIRST_FAILURE).unlink(missing_ok=True)
        for report in self.run_dir.glob("*/*.json"):
            report.unlink()


def supervise(job: NodeJob) -> int:
    """Supervise an elastic job, as `deepspeed.tools.launcher.agent.supervise` does another."""
    with memory() as kept:

        def make(job: NodeJob, run_dir: Path) -> Supervisor:
            rendezvous: Any = None
            if job.nodes > 1:
                from deepspeed.tools.launcher.rendezvous import meet

                rendezvous = meet(job, kept)
            return ElasticSupervisor(job, run_dir, kept, rendezvous)

        return agent.supervise(job, make)
