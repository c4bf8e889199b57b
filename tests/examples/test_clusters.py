"""examples/clusters: batch files for Slurm, manifests for Kubernetes. Slow tests start a real Slurm with two nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.tools.launcher.runner import parse_args
from tests.pool import ROOT, free_port

FOLDER = ROOT / "examples" / "clusters"
BATCH_FILES = sorted((FOLDER / "slurm").glob("*.sbatch"))
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
PROBES = {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
TRAIN = ("examples/elastic/train.py", "--save_every", "1000")


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """Yield each pod template's spec, wherever a kind of resource keeps it."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_fit_their_schemas(file: Path) -> None:
    """Kinds of Kubernetes itself as they are; of others the pods in them, as a pod."""
    yaml = pytest.importorskip("yaml")
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in yaml.safe_load_all(file.read_text()):
        if "." not in document["apiVersion"].partition("/")[0]:
            validate(document, "1.31", strict=True)
        for spec in pods(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
            validate(pod, "1.31", strict=True)


@pytest.mark.parametrize(
    ("file", "kind"), [("jobset", "JobsetV1alpha2JobSet"), ("trainjob", "TrainerV1alpha1TrainJob")]
)
def test_manifests_of_kubeflow_and_jobset_fit_theirs(file: str, kind: str) -> None:
    """Kubeflow's own models of them; a field that they do not know is dropped on the way."""
    yaml = pytest.importorskip("yaml")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (document,) = yaml.safe_load_all((FOLDER / "kubernetes" / f"{file}.yaml").read_text())
    assert getattr(models, kind).from_dict(document).to_dict() == document


def as_text(node: Any) -> Any:
    """Return ``node`` with scalars as strings: a quantity may be written as a number."""
    if isinstance(node, dict):
        return {key: as_text(value) for key, value in node.items()}
    return [as_text(each) for each in node] if isinstance(node, list) else str(node)


def test_the_manifest_of_the_training_operator_fits_its_models() -> None:
    """A field that the models do not know is dropped on the way."""
    yaml = pytest.importorskip("yaml")
    training = pytest.importorskip("kubeflow.training")
    (document,) = yaml.safe_load_all((FOLDER / "kubernetes" / "pytorchjob.yaml").read_text())
    client = training.ApiClient()
    response = SimpleNamespace(data=json.dumps(document))
    job = client.deserialize(response, "KubeflowOrgV1PyTorchJob")
    assert as_text(client.sanitize_for_serialization(job)) == as_text(document)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_commands_of_manifests_are_ours(file: Path) -> None:
    yaml = pytest.importorskip("yaml")
    for document in yaml.safe_load_all(file.read_text()):
        for spec in pods(document):
            (container,) = spec["containers"]
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "/dev/shm" in mounts, "ranks of one machine meet there"
            probes = {
                name: each["httpGet"]["path"] for name, each in container.items() if name.endswith("Probe")
            }
            assert not probes or probes == PROBES
            if container["command"] == ["deepspeed"]:
                words = [re.sub(r"\$\(.*\)", "0", word) for word in container["args"]]
                options = parse_args(words)
                assert options.no_ssh and options.num_nodes == 2 and options.user_script == "train.py"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("file", BATCH_FILES, ids=lambda file: file.stem)
def test_batch_files_are_valid_shell(file: Path) -> None:
    subprocess.run(["bash", "-n", str(file)], check=True)
    commands = [line for line in file.read_text().splitlines() if line.startswith("#   sbatch ")]
    assert commands == [f"#   sbatch {file.relative_to(ROOT)} examples/elastic/train.py --steps 2000"]


class Slurm:
    """slurmctld and two slurmd on this machine, which the jobs see as two nodes."""

    def __init__(self, folder: Path) -> None:
        host, self.daemons = socket.gethostname().split(".")[0], []
        ports = [free_port() for _ in range(3)]
        self.config = folder / "slurm.conf"
        self.config.write_text(
            f"""
            ClusterName=test
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={ports[0]}
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            StateSaveLocation={folder}/state
            SlurmdSpoolDir={folder}/spool-%n
            SlurmctldPidFile={folder}/ctld.pid
            SlurmdPidFile={folder}/%n.pid
            SlurmctldLogFile={folder}/ctld.log
            SlurmdLogFile={folder}/%n.log
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core
            ReturnToService=2
            JobAcctGatherType=jobacct_gather/none
            KillWait=15
            NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={os.cpu_count()} RealMemory=2000
            NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={os.cpu_count()} RealMemory=2000
            PartitionName=main Nodes=n[1-2] Default=YES State=UP
            """
        )
        (folder / "state").mkdir()
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.config),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MASTER_ADDR": "127.0.0.1",  # n1 is no name of this machine's
        }
        if subprocess.run(["munge", "-n"], capture_output=True).returncode != 0:
            os.makedirs("/run/munge", exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True)
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            self.daemons.append(subprocess.Popen(command, env=self.environment))
        self.until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T").split()[:1], "idle nodes")

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True)
        return done.stdout

    def submit(self, output: Path, *words: str) -> str:
        return self.run("sbatch", "--parsable", f"--output={output}", *words).strip()

    def until(self, check: Any, what: str, seconds: float = 240) -> None:
        limit = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < limit, f"no {what}"
            time.sleep(0.2)

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(30)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if os.name == "nt" or os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("needs Slurm's and munge's daemons, and root")
    found = Slurm(tmp_path_factory.mktemp("slurm"))
    yield found
    found.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_node", "several_nodes"])
def test_slurm_runs_a_job(slurm: Slurm, tmp_path: Path, name: str) -> None:
    output = tmp_path / "out"
    job = slurm.submit(
        output, str(FOLDER / "slurm" / f"{name}.sbatch"), *TRAIN, "--steps=5", f"--folder={tmp_path}/run"
    )
    slurm.until(lambda: job not in slurm.run("squeue", "--noheader", "--format=%A").split(), "end of the job")
    assert "ranks=2" in output.read_text() and "step 5: loss" in output.read_text(), output.read_text()


@pytest.mark.slow
def test_slurm_queues_a_job_again_which_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = slurm.submit(
        output, str(FOLDER / "slurm" / "requeue.sbatch"), *TRAIN, "--steps=400", f"--folder={tmp_path}/run"
    )
    slurm.until(lambda: output.exists() and "step=50," in output.read_text(), "step 50")
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    slurm.until(lambda: "queued again" in output.read_text(), "requeue")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait two minutes
    slurm.until(lambda: "step 400: loss" in output.read_text(), "second run")
    assert re.search(r"checkpoint.resume: resumed at step \d\d", output.read_text())
