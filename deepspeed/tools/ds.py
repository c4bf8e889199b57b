"""The `ds` command: lists the tools or runs the named one; any other arguments go to the `deepspeed` launcher."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

from deepspeed.base.python_gc import python_gc_manager
from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.tools import parsers, serve_options
from deepspeed.tools.starter import arguments as starter

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


class Tool(NamedTuple):
    """A command of this package: ``function`` of a module in `deepspeed.tools`, which is imported only when it runs:
    most need torch, the launcher does not."""

    module: str
    arguments: str
    purpose: str
    parser: Callable[[], argparse.ArgumentParser] | None = None
    """Set if the tool's module imports torch: help and usage errors then exit before that import."""
    is_short: bool = False
    """Whether it only reads a config: start-up is most of its run time."""
    function: str = "main"

    def run(self, arguments: Sequence[str] | None) -> int | None:
        """Import the module and run the tool; return its exit code."""
        return getattr(importlib.import_module(f"deepspeed.tools.{self.module}"), self.function)(arguments)


TOOLS = {
    "init": Tool(
        "starter.command",
        "[FOLDER] --model MODEL --goal GOAL",
        "write a config, a training script and a launch command for your machines",
        starter.parser,
    ),
    "plan": Tool(
        "plan",
        "CONFIG --model MODEL --gpus N",
        "predict the memory per rank before allocating anything, and the step time",
        parsers.plan,
    ),
    "check": Tool("config.command", "CONFIG", "report all errors in a config at once", parsers.check, True),
    "diff": Tool("diff", "RUN_A RUN_B", "find where two runs recorded with `audit` first differ"),
    "trace": Tool(
        "trace", "FOLDER [-o FILE]", "summarize a `trace`: where the time went and who waited for whom"
    ),
    "live": Tool("live", "FOLDER", "serve the live page of a run from its record (`monitor.live`)"),
    "top": Tool("top", "[--once]", "watch your runs on this machine in the terminal"),
    "report": Tool(
        "env_report",
        "[--bench]",
        "report versions, devices and the path each op takes",
        parsers.report,
        function="cli_main",
    ),
    "serve": Tool(
        "serve", "MODEL", "serve a model over HTTP with an OpenAI-compatible API", serve_options.parser
    ),
    "stacks": Tool(
        "stacks", "[PID]", "show what every rank of a running job is doing: Python stacks, last collectives"
    ),
    "doctor": Tool(
        "doctor",
        "[--hostfile FILE]",
        "check that this machine or the machines of a hostfile are ready for a job",
    ),
    "bench": Tool("bench", "--num_gpus N", "benchmark collectives by size and transport"),
    "elastic": Tool(
        "elastic.command",
        "-c CONFIG [-w N]",
        "compute the batch size and numbers of ranks of an `elasticity` section",
        parsers.elastic,
        True,
    ),
    "ssh": Tool("ssh_all", "-f HOSTFILE COMMAND", "run a command on every machine of a hostfile"),
    "io": Tool("nvme.ds_io", "--folder DIR --io_size 1G", "benchmark reads or writes of files", parsers.io),
    "nvme_tune": Tool(
        "nvme.tune", "--nvme_dir DIR", "find the best `aio` section for a storage device", parsers.nvme_tune
    ),
}


def usage() -> str:
    """Return the text that `ds` prints without arguments."""
    rows = [(f"ds {name} {tool.arguments}", tool.purpose) for name, tool in TOOLS.items()]
    rows.append(("ds [options] script.py ...", "run a script on every device, as `deepspeed` does"))
    width = max(len(call) for call, _ in rows)
    lines = [f"  {call:{width}}  {purpose}" for call, purpose in rows]
    return "\n".join(
        ["usage:", *lines, "Every tool has --help; `ds --help` also shows the options of the launcher."]
    )


def main(argv: Sequence[str] | None = None) -> int | None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(usage())
        return 0
    first, rest = arguments[0], arguments[1:]
    if first in TOOLS:
        return run_tool(first, rest)
    if first in ("-h", "--help"):
        print(usage(), end="\n\n")
    import difflib  # imported here: not needed if a tool is named, as with `ds check`

    from deepspeed.tools.launcher import runner
    from deepspeed.tools.launcher.shim import USAGE_ERROR

    near = difflib.get_close_matches(first, TOOLS, n=1, cutoff=0.7)
    if near and not os.path.exists(first):
        print(f"ds: there is no tool or script {first!r}; did you mean 'ds {near[0]}'?", file=sys.stderr)
        return USAGE_ERROR
    runner.main(argv)
    return None


def run_tool(name: str, arguments: Sequence[str] | None = None) -> int | None:
    """Run a tool with these arguments, or with the command line's; return its exit code."""

    @exit_quietly(f"ds {name}")
    def run() -> int | None:  # importing torch takes seconds, during which Ctrl-C may arrive, too
        tool = TOOLS[name]
        if tool.parser is not None:
            tool.parser().parse_args(arguments)
        with _short_start() if tool.is_short else nullcontext():
            return tool.run(arguments)

    return run()


@contextmanager
def _short_start() -> Iterator[None]:
    """Pause garbage collection and disable pydantic's plugin search over all installed packages: a fifth of the CPU
    time of a tool that only reads a config."""
    chosen = _PLUGINS in os.environ
    os.environ.setdefault(_PLUGINS, "__all__")
    try:
        with python_gc_manager.paused():
            yield
    finally:
        if not chosen:
            del os.environ[_PLUGINS]


# Entry points of the same tools as scripts: torch is imported inside `run_tool`, which handles Ctrl-C.
ds_report = partial(run_tool, "report")
ds_check = partial(run_tool, "check")
ds_io = partial(run_tool, "io")
ds_bench = partial(run_tool, "bench")
ds_ssh = partial(run_tool, "ssh")
ds_elastic = partial(run_tool, "elastic")
ds_nvme_tune = partial(run_tool, "nvme_tune")


if __name__ == "__main__":
    raise SystemExit(main())
