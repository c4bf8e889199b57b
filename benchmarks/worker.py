"""One rank of a benchmark job: makes an object, then calls its methods as the driver asks, asleep in between.

Started by ``jobs.Job`` as ``python worker.py MODULE:CLASS OPTIONS``, in this folder, in any environment. Each
line on stdin is a JSON list ``[method, arguments]``; each answer is one JSON line ``{"value": ...}`` or
``{"error": traceback}`` on what was stdout. Whatever the code under test prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, TextIO


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    options = json.loads(sys.argv[2])
    subject: Any = None

    def create() -> None:
        nonlocal subject
        subject = getattr(importlib.import_module(module), name)(**options)

    # Being told to end is an exception, so that a kernel build under way gives its lock file back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        answer(answers, create)
        for line in sys.stdin:
            method, arguments = json.loads(line)
            answer(answers, lambda m=method, a=arguments: getattr(subject, m)(**a))
    finally:
        os._exit(0)  # no collective teardown: the other ranks may be gone already


def answer(answers: TextIO, action: Any) -> None:
    try:
        reply = {"value": action()}
    except Exception:
        reply = {"error": traceback.format_exc()}
    answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
