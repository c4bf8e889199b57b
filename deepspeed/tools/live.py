"""`ds live FOLDER`: the live page of a run from its record, while it runs elsewhere or after it has ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from deepspeed.base.tool_arguments import ArgumentParser, add_options, exit_quietly, takes
from deepspeed.observe.live.history import SPEED_ROWS, MetricHistory, summarize_rows
from deepspeed.observe.live.record import NAME, read_more
from deepspeed.observe.live.server import TOKEN_VARIABLE, PageServer, token_for

POLL_S = 1.0


class Follower:
    """A metric history that follows a growing record file."""

    def __init__(self, path: Path) -> None:
        self.history = MetricHistory()
        self._path, self._offset = path, 0

    def look(self) -> None:
        """Read the new entries. OSError, ValueError: the file cannot be read."""
        if self._path.stat().st_size < self._offset:  # a new run has overwritten the file
            self._offset = 0
            self.history.clear()
        entries, self._offset = read_more(self._path, self._offset)
        self.history.extend(entries)
        rows = self.history.newest(SPEED_ROWS)
        self.history.set_state(**summarize_rows(rows, self.history.state.get("run", {})), recorded=True)


@exit_quietly("ds live", OSError, ValueError, OverflowError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="ds live",
        description="Serve the live page of a run from the record that `monitor.live` keeps, during the run or "
        "after it. Stop with Ctrl-C.",
    )
    options = {
        "folder": takes("the run's monitor.live.folder, or an older record in it", type=Path),
        "--host": takes(
            "address to listen on (default: %(default)s). If other machines can connect, a token is "
            f"required: set {TOKEN_VARIABLE}, or one is written to the folder",
            "127.0.0.1",
        ),
        "--port": takes("port to listen on, or the next free one (default: 8470)", 8470),
    }
    args = add_options(parser, options).parse_args(argv)
    path = args.folder / NAME if args.folder.is_dir() else args.folder
    follower = Follower(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; it is written by runs with monitor.live")
    follower.look()
    server = PageServer(follower.history, args.host, args.port, token_for(args.host, path.parent))
    print(f"{path}: {server.address}   (Ctrl-C stops)", flush=True)
    try:
        follow(follower, threading.Event())
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def follow(follower: Follower, end: threading.Event) -> None:
    """Read new entries until ``end`` is set; after an error, print it and retry later."""
    while not end.wait(POLL_S):
        try:
            follower.look()
        except (OSError, ValueError) as error:
            print(f"ds live: {error}", file=sys.stderr)
            end.wait(10 * POLL_S)


if __name__ == "__main__":
    raise SystemExit(main())
