"""What a benchmark prints and saves: the numbers with the commit, the date and the machine."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import FOLDER, progress

RESULTS = FOLDER / "results"


def common_arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a short form, under a minute: shows that it runs"
    )
    parser.add_argument(
        "--peer",
        metavar="PYTHON",
        help="interpreter of the peer's virtual environment (README.md); default: none",
    )
    parser.add_argument(
        "--save", metavar="WHAT", help="also write results/<script>_<WHAT>.txt and .json; default: only print"
    )
    return parser


class Report:
    """Collects lines and data, prints the lines as they come, and saves both when asked."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.what: str | None = arguments.save
        # A path of the machine says nothing to a reader.
        hidden = (
            "save",
            "peer",
            "before",
            "clients",
            "llama",
            "vllm",
            "llama_server",
            "transformers",
            "trl",
            "scripts",
            "folder",
            "text",
            "rounds_file",
        )
        self.data: dict[str, Any] = {
            **provenance(),
            "arguments": {k: v for k, v in vars(arguments).items() if k not in hidden},
        }
        self.lines: list[str] = []
        self.line(f"{name}: commit {self.data['commit']}, {self.data['date']}")
        self.line(self.data["machine"])

    def line(self, text: str = "") -> None:
        progress("")
        print(text, flush=True)
        self.lines.append(text)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        self.line()
        self.line(title)
        for row in [header, ["-" * width for width in widths], *rows]:
            cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
            self.line("  ".join(cells).rstrip())

    def save(self) -> None:
        if self.what is None:
            return
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}_{self.what}"
        Path(f"{path}.txt").write_text("\n".join(self.lines) + "\n")
        Path(f"{path}.json").write_text(json.dumps(self.data, indent=1) + "\n")


def provenance() -> dict[str, str]:
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
    }


def commit() -> str:
    """Short hash of the checkout, "+changes" when the package differs from it."""
    try:
        git = ["git", "-C", str(FOLDER.parent)]
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        status = ["status", "--porcelain", "--untracked-files=no", "deepspeed", "csrc", "benchmarks/*.py"]
        changes = subprocess.run([*git, *status], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def machine() -> str:
    processor, memory = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(
            tuple(part.strip() for part in line.split(":", 1))
            for line in cpuinfo.read_text().splitlines()
            if ":" in line
        )
        processor = fields.get("model name", processor)
        if "avx512_bf16" in fields.get("flags", ""):
            processor += " with AVX-512 BF16"
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = f", {pages / 2**30:.0f} GiB"
    return (
        f"{processor}, {os.cpu_count()} cores{memory}, Python {platform.python_version()}, "
        f"torch {importlib.metadata.version('torch')}"
    )
