"""The package's logger, logging on selected ranks, and line breaks between log lines and tqdm's bars."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from deepspeed.base.environment import default_group, this_process


def open_bars() -> list[Any]:
    """Return the tqdm bars on the screen."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    instances = list(getattr(tqdm, "_instances", None) or ())
    return [bar for bar in instances if not getattr(bar, "disable", False)]


class LineBreaks:
    """Tracks whether a log line has to begin with a newline, because a progress bar is on the current line."""

    def __init__(self) -> None:
        self._after_ours: Any = None

    def needed(self, stream: TextIO) -> bool:
        """Return whether a bar on the file of ``stream`` was drawn since the last call of ``written``."""
        bars = [bar for bar in open_bars() if _same_file(getattr(bar, "fp", None), stream)]
        return bool(bars) and _state(stream, bars) != self._after_ours

    def written(self, stream: TextIO) -> None:
        """Record that the last line of ``stream`` is complete."""
        bars = open_bars()
        self._after_ours = _state(stream, bars) if bars else None


def _state(stream: TextIO, bars: list[Any]) -> Any:
    """Return a value that changes when a bar is drawn: the position in a file; the bars' print times for a pipe or a
    terminal."""
    try:
        return os.lseek(stream.fileno(), 0, os.SEEK_CUR)
    except (OSError, ValueError, AttributeError):
        return [(id(bar), getattr(bar, "last_print_t", None)) for bar in bars]


def _same_file(bar: Any, stream: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(bar.fileno()), os.fstat(stream.fileno()))
    except (OSError, ValueError, AttributeError):  # objects that only resemble files
        return False


log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

LINE_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
ALL_RANKS = -1

LEVEL_VARIABLE = "DEEPSPEED_LOG_LEVEL"
"""Environment variable with the name of a level; it takes precedence over the config key ``log_level``."""

QUIET_WHEN_COMPILING = "DISABLE_LOGS_WHILE_COMPILING"
STILL_LOUD_WHEN_COMPILING = "LOGGER_METHODS_TO_EXCLUDE_FROM_DISABLE"
LOGGER_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")


def write_safely(text: str, stream: TextIO | None) -> bool:
    """Write and flush; return False if that fails, as for a closed pipe or a full disk."""
    try:
        assert stream is not None
        stream.write(text)
        stream.flush()
    except (OSError, ValueError, AttributeError, AssertionError):
        return False
    return True


class _StdoutHandler(logging.StreamHandler):
    """Handler that writes to the current ``sys.stdout`` (often redirected after import), and never on the line of a
    progress bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self._breaks = LineBreaks()

    def emit(self, record: logging.LogRecord) -> None:
        stream = self.stream
        if stream is not None and self._breaks.needed(stream):
            write_safely("\n", stream)
        super().emit(record)
        if stream is not None:
            self._breaks.written(stream)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:
        """Fall back to standard error: a closed or full standard output must not stop training."""
        if not isinstance(sys.exc_info()[1], (OSError, ValueError, AttributeError)):
            return super().handleError(record)
        write_safely(self.format(record) + "\n", sys.stderr)


class LoggerFactory:
    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Create a logger with one handler on standard output, separate from the root logger.

        With ``DISABLE_LOGS_WHILE_COMPILING=1``, ``torch.compile`` skips calls of its methods, which would break the
        graph, except those in ``LOGGER_METHODS_TO_EXCLUDE_FROM_DISABLE`` (separated by commas).
        """
        if not name:
            raise ValueError("A logger needs a name.")
        created = logging.getLogger(name)
        created.setLevel(level)
        created.propagate = False
        if not created.handlers:
            handler = _StdoutHandler()
            handler.setFormatter(logging.Formatter(LINE_FORMAT))
            created.addHandler(handler)
        if os.environ.get(QUIET_WHEN_COMPILING, "0") == "1":
            _quiet_while_compiling(created)
        return created


def _quiet_while_compiling(created: logging.Logger) -> None:
    import torch._dynamo.config as dynamo  # slow, and only needed on request

    loud = {method.strip() for method in os.environ.get(STILL_LOUD_WHEN_COMPILING, "").split(",")}
    quiet = {getattr(created, method) for method in LOGGER_METHODS if method not in loud}
    dynamo.ignore_logger_methods = dynamo.ignore_logger_methods | quiet


def level_of_environment() -> int | None:
    """Return the level named by the environment variable; None if it names none."""
    return log_levels.get(os.environ.get(LEVEL_VARIABLE, "").strip().lower())


logger = LoggerFactory.create_logger(name="DeepSpeed", level=level_of_environment() or logging.WARNING)


def apply_log_level(name: str | None) -> None:
    """Set the level that a config requests (None: leave it), unless the environment sets it."""
    if name is not None and level_of_environment() is None:
        logger.setLevel(get_log_level_from_string(name))


def wants_reports(name: str | None) -> bool:
    """Return whether to show unrequested INFO reports: not if the environment, the config's ``log_level`` (``name``)
    or the script has raised the level."""
    asked = level_of_environment()
    if asked is None and name is not None:
        asked = get_log_level_from_string(name)
    if asked is None:
        return logger.level <= logging.WARNING  # the level of the package
    return asked <= logging.INFO


def report(message: Any) -> None:
    """Log an INFO line on rank 0 at any level; callers check ``wants_reports`` first."""
    if not is_rank_zero():
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    text = f"[Rank 0] {message}"
    logger.handle(logger.makeRecord(logger.name, logging.INFO, file, line, text, (), None, function))


def this_rank() -> int:
    """Return the rank in the default process group; before there is one, the launcher's rank, else 0."""
    group = default_group()
    if group is not None:
        return group[0]
    try:
        return this_process(os.environ).rank
    except ValueError:  # reported by the code that needs the whole identity
        rank = os.environ.get("RANK", "")
        return int(rank) if rank.isdigit() else 0


def is_rank_zero() -> bool:
    return this_rank() == 0


def _logs_here(ranks: Iterable[int] | None) -> bool:
    wanted = (ALL_RANKS,) if ranks is None else tuple(ranks)
    return ALL_RANKS in wanted or this_rank() in wanted


def get_dist_msg(message: Any, ranks: Iterable[int] | None = None) -> str | None:
    """Return the message with this rank's number, None if this rank is not in ``ranks`` (None or [-1]: all)."""
    return f"[Rank {this_rank()}] {message}" if _logs_here(ranks) else None


def log_dist(message: Any, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the listed ranks; None or [-1] means all."""
    if logger.isEnabledFor(level) and (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text, stacklevel=2)


def print_dist(message: Any, ranks: Iterable[int] | None = None) -> None:
    """Print on the listed ranks at any log level, for reports that the user requested."""
    if (text := get_dist_msg(message, ranks)) is not None:
        write_safely(text + "\n", sys.stdout)


@functools.cache
def _once(key: tuple[int, str]) -> list[bool]:
    return [True]


def _is_first_time(level: int, text: str) -> bool:
    flag = _once((level, text))
    first, flag[0] = flag[0], False
    return first


def log_dist_once(message: Any, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Call ``log_dist`` the first time this text occurs."""
    first = logger.isEnabledFor(level) and _is_first_time(level, str(message))
    if first and (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text, stacklevel=2)


def warning_once(message: Any, *args: Any) -> None:
    """Call ``logger.warning`` the first time this text occurs."""
    text = str(message) % args if args else str(message)
    if logger.isEnabledFor(logging.WARNING) and _is_first_time(logging.WARNING, text):
        logger.warning("%s", text, stacklevel=2)


def print_json_dist(
    message: dict[str, Any], ranks: Iterable[int] | None = None, path: str | None = None
) -> None:
    """Write ``message`` and this rank's number as JSON to ``path`` (None: standard output) on the listed ranks."""
    if not _logs_here(ranks):
        return
    text = json.dumps({**message, "rank": this_rank()})
    if path is None:
        write_safely(text + "\n", sys.stdout)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of ``args``, one per line, in alphabetical order."""
    logger.info("%s:", name, stacklevel=2)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), getattr(args, key), stacklevel=2)


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level name in any case. ValueError: an unknown name."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        names = ", ".join(log_levels)
        raise ValueError(f"{log_level_str!r} is not one of the valid logging levels: {names}.")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))
