"""Machines with a real sshd and pdsh: namespaces of this one (`benchmarks/links.py`), programs from Debian's packages.

    python -m tests.launcher.real_machines install

downloads and unpacks the packages into `.machines`, without installing them: nothing else on this machine changes.
Tests that need them are skipped, with the reason, where that has not been done or cannot be.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.links import Links

ROOT = Path(__file__).resolve().parents[2] / ".machines"
PACKAGES = ("openssh-server", "libwrap0", "pdsh", "libgenders0")
READY_S = 20.0
SSHD_CONFIG = """\
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PasswordAuthentication no
UsePAM no
StrictModes no
PermitRootLogin yes
PidFile none
AcceptEnv none
"""
SSH_CONFIG = """\
Host *
  IdentityFile {keys}/user
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
# What sshd looks for at fixed places, seen on that host only.
START = """
set -e
mount -t tmpfs none /run
mkdir /run/sshd
cp /etc/passwd {keys}/passwd.{host}
echo 'sshd:x:64999:65534::/run/sshd:/bin/false' >> {keys}/passwd.{host}
mount --bind {keys}/passwd.{host} /etc/passwd
LD_LIBRARY_PATH={root}/usr/lib/x86_64-linux-gnu exec {root}/usr/sbin/sshd -D -e -f {keys}/sshd_config
"""


def install() -> None:
    """Raises CalledProcessError where there are no such packages, FileNotFoundError where there is no apt."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(ROOT)], check=True)


def why_not() -> str:
    """Why there are no such machines here; empty if there are."""
    if not (ROOT / "usr/sbin/sshd").exists():
        return "no sshd: python -m tests.launcher.real_machines install"
    if os.geteuid() != 0:
        return "sshd for several users' names needs root"
    return ""


class Machines(Links):
    """``hosts`` machines, host0 and so on, each with an sshd; `on` runs a command on one of them."""

    def __init__(self, hosts: int, folder: Path) -> None:
        super().__init__(hosts)
        self.folder = folder
        keys = folder / "keys"
        keys.mkdir()
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True
            )
        (keys / "sshd_config").write_text(SSHD_CONFIG.format(keys=keys))
        self.ssh_config = keys / "ssh_config"
        self.ssh_config.write_text(SSH_CONFIG.format(keys=keys))
        self._servers = [self._serve(host, keys) for host in range(hosts)]
        limit = time.monotonic() + READY_S
        for host in range(hosts):
            while self.on(0, ["ssh", "-F", str(self.ssh_config), f"host{host}", "true"]).returncode:
                if time.monotonic() > limit:
                    said = (folder / f"sshd.{host}").read_text()
                    self.close()
                    raise RuntimeError(f"the sshd of host{host} does not answer: {said}")
                time.sleep(0.1)

    def _serve(self, host: int, keys: Path) -> subprocess.Popen[bytes]:
        with open(self.folder / f"sshd.{host}", "w") as log:
            return subprocess.Popen(
                [*self.entry(host), "sh", "-c", START.format(keys=keys, host=host, root=ROOT)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

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
        raise SystemExit(f"usage: {shlex.join(sys.argv[:1])} install")
    install()
