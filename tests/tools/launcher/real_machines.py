"""Machines with real programs: namespaces of this one (`benchmarks/links.py`), with sshd, pdsh, Open MPI and Slurm from
Debian's packages.

    python -m tests.tools.launcher.real_machines install

downloads the packages and unpacks them into `.machines`. They are not installed: on these machines, and only there, the
folder lies over `/usr` and `/etc`. Tests that need them are skipped, with the reason, where there are none.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.links import Links  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[3] / ".machines"
PACKAGES = ("openssh-server", "pdsh", "openmpi-bin", "slurmd", "slurmctld", "slurm-client", "munge")
LINKS = {
    "bin/mpirun": "mpirun.openmpi",
    **{f"sbin/{name}": f"{name}-wlm" for name in ("slurmctld", "slurmd", "slurmstepd")},
}
READY_S = 30.0
SSHD_CONFIG = """\
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PasswordAuthentication no
UsePAM no
StrictModes no
PermitRootLogin yes
PidFile none
"""
SSH_CONFIG = """\
Host *
  IdentityFile {keys}/user
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
SLURM_CONFIG = """\
ClusterName=test
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
KillWait=2
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
StateSaveLocation=/run/slurmctld
NodeName=host[0-{last}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
CGROUP_CONFIG = "CgroupPlugin=cgroup/v1\n"
# What programs look for at fixed places, seen on that host only.
START = """
set -e
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/sshd /run/munge /run/slurmd /run/slurmctld
mount -t overlay overlay -o lowerdir={root}/usr:/usr /usr
mount -t overlay overlay -o lowerdir={etc}:{root}/etc:/etc /etc
munge="/run/munge"
munged --force --log-file=$munge/log --pid-file=$munge/pid --seed-file=$munge/seed || true
{slurm}
exec /usr/sbin/sshd -D -e -f {keys}/sshd_config
"""
SLURM_FIRST, SLURM = "slurmctld -c; slurmd", "slurmd"


def install() -> None:
    """Raises CalledProcessError where there are no such packages, FileNotFoundError where there is no apt."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "partial").mkdir()
        command = ["apt-get", "install", "--yes", "--no-install-recommends", "--download-only"]
        subprocess.run([*command, "-o", f"Dir::Cache::archives={folder}", *PACKAGES], check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(ROOT)], check=True)
    for name, target in LINKS.items():  # that an installation would have made
        (ROOT / "usr" / name).symlink_to(target)
    shutil.copytree(ROOT / "lib", ROOT / "usr/lib", symlinks=True, dirs_exist_ok=True)


def why_not() -> str:
    """Why there are no such machines here; empty if there are."""
    if not (ROOT / "usr/sbin/sshd").exists():
        return "no sshd: python -m tests.tools.launcher.real_machines install"
    if os.geteuid() != 0:
        return "sshd at its own place, with users of its own, needs root"
    return ""


class Machines(Links):
    """``hosts`` machines, host0 and so on, each with an sshd; `on` runs a command on one of them, in ``folder``."""

    def __init__(self, hosts: int, folder: Path, *, slurm: bool = False) -> None:
        super().__init__(hosts)
        self.folder = folder
        self._keys = folder / "keys"
        self._keys.mkdir()
        for name in ("host", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / name)]
            subprocess.run(key, check=True)
        (self._keys / "sshd_config").write_text(SSHD_CONFIG.format(keys=self._keys))
        self._etc = self._settings(hosts)
        self._servers = [self._serve(host, slurm) for host in range(hosts)]
        for host in range(hosts):
            self._until(host, ["ssh", f"host{host}", "true"])
        if slurm:
            self._until(0, ["srun", f"-N{hosts}", "true"])

    def _settings(self, hosts: int) -> Path:
        """A folder over /etc."""
        etc = self._keys / "etc"
        for name in ("ssh/ssh_config.d", "slurm", "munge"):
            (etc / name).mkdir(parents=True)
        passwd = Path("/etc/passwd").read_text()
        (etc / "passwd").write_text(f"{passwd}sshd:x:64999:65534::/run/sshd:/bin/false\n")
        names = ["127.0.0.1 localhost", *(f"{self.address(i)} host{i}" for i in range(hosts))]
        (etc / "hosts").write_text("\n".join(names) + "\n")
        (etc / "ssh/ssh_config.d/machines.conf").write_text(SSH_CONFIG.format(keys=self._keys))
        (etc / "slurm/slurm.conf").write_text(SLURM_CONFIG.format(last=hosts - 1))
        (etc / "slurm/cgroup.conf").write_text(CGROUP_CONFIG)
        (etc / "munge/munge.key").write_bytes(secrets.token_bytes(1024))
        (etc / "munge/munge.key").chmod(0o600)
        return etc

    def _serve(self, host: int, slurm: bool) -> subprocess.Popen[bytes]:
        start = START.format(
            keys=self._keys,
            root=ROOT,
            etc=self._etc,
            slurm=(SLURM if host else SLURM_FIRST) if slurm else "",
        )
        with open(self.folder / f"servers.{host}", "w") as log:
            return subprocess.Popen(
                [*self.entry(host), "sh", "-c", start],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _until(self, host: int, command: list[str]) -> None:
        limit = time.monotonic() + READY_S
        while (done := self.on(host, command)).returncode:
            if time.monotonic() > limit:
                logs = "\n".join(path.read_text() for path in sorted(self.folder.glob("servers.*")))
                self.close()
                raise RuntimeError(f"{command} on host{host}: {done.stderr}\n{logs}")
            time.sleep(0.1)

    def entry(self, host: int) -> list[str]:
        """As of Links; the command runs in `folder`."""
        first, *others = super().entry(host)
        return [first, f"--wd={getattr(self, 'folder', '/')}", *others]

    def on(self, host: int, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.entry(host), *command], capture_output=True, text=True, check=False, **options
        )

    def stop(self, host: int) -> None:
        """The machine and all that runs there is gone at once."""
        self._hosts[host].kill()

    def close(self) -> None:
        for server in getattr(self, "_servers", ()):
            server.kill()
            server.wait()
        super().close()


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        raise SystemExit("usage: python -m tests.tools.launcher.real_machines install")
    shutil.rmtree(ROOT, ignore_errors=True)
    install()
