"""``deepspeed --autotuning tune|run SCRIPT``, called by the launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.base.logging import logger
from deepspeed.tools.autotuning.autotuner import Autotuner

INTERRUPTED = 130


def run_autotuning(args: Any, active_resources: Mapping[str, Sequence[int]]) -> int:
    """Tune, print the results, and with ``--autotuning run`` run the script with the best config. Returns the exit
    code. Ctrl-C ends the tuning and keeps the best config so far.

    Raises:
        ValueError: The script is given no config, or it cannot be read.
    """
    code = 0
    tuner = Autotuner(args, dict(active_resources))
    try:
        tuner.tune()
    except KeyboardInterrupt:
        tuner.reason = "interrupted; rerun the same command to resume"
        code = INTERRUPTED
    except ValueError as error:
        logger.error("autotuning: %s", error)
        code = 1
    tuner.print_tuning_results()
    if code == 0 and args.autotuning == "run":
        return tuner.run_after_tuning()
    return code
