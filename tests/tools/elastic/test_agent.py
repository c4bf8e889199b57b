"""The elastic agent: its workers get the environment, and a failed worker is restarted."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from deepspeed.tools.elastic import DSElasticAgent
from deepspeed.tools.launcher.agent import SingleMachineRendezvous

WORKER = """
import os, pathlib, sys
seen = pathlib.Path(sys.argv[1])
line = " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "COLOUR"))
first = not seen.exists()
seen.write_text((seen.read_text() if seen.exists() else "") + line + "\\n")
sys.exit(3 if first else 0)
"""


def test_workers_get_the_environment_and_are_started_anew(tmp_path: Path) -> None:
    spec = WorkerSpec(
        role="trainer",
        local_world_size=1,
        entrypoint=sys.executable,
        args=("-S", "-c", WORKER.replace("$", "$$"), str(tmp_path / "seen")),
        rdzv_handler=SingleMachineRendezvous("127.0.0.1", 29417),
        max_restarts=1,
        monitor_interval=0.05,
    )
    agent = DSElasticAgent(spec, {"COLOUR": "red", "RANK": "7"}, log_dir=str(tmp_path / "logs"))
    assert isinstance(agent, LocalElasticAgent)
    result = agent.run()
    assert not result.is_failed()
    assert (tmp_path / "seen").read_text() == "0 1 red\n" * 2
