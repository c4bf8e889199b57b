"""Numbers of a server, in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Histogram:
    """Histogram of durations in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*_BOUNDS, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Counters of requests and tokens; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._first_token = Histogram()
        self._whole = Histogram()

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first_token.add(seconds)

    def computed(self, prompt_tokens: int, new_tokens: int) -> None:
        """The generator is done with a request."""
        with self._lock:
            self._tokens["prompt"] += prompt_tokens
            self._tokens["generated"] += new_tokens

    def finished(self, reason: str, seconds: float) -> None:
        """A request has ended for its client."""
        with self._lock:
            self._finished[reason] += 1
            self._whole.add(seconds)

    def text(self, now: Mapping[str, float]) -> str:
        """``now``: values of this moment, by name."""
        with self._lock:
            lines = [
                "# TYPE deepspeed_requests_total counter",
                *(f'deepspeed_requests_total{{reason="{k}"}} {v}' for k, v in sorted(self._finished.items())),
                "# TYPE deepspeed_tokens_total counter",
                *(f'deepspeed_tokens_total{{kind="{k}"}} {v}' for k, v in sorted(self._tokens.items())),
                "# TYPE deepspeed_time_to_first_token_seconds histogram",
                *self._first_token.lines("deepspeed_time_to_first_token_seconds"),
                "# TYPE deepspeed_request_seconds histogram",
                *self._whole.lines("deepspeed_request_seconds"),
            ]
        for name, value in now.items():
            lines += [f"# TYPE deepspeed_{name} gauge", f"deepspeed_{name} {value:g}"]
        return "\n".join(lines) + "\n"
