"""Metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

_SECONDS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Histogram of durations in seconds, or of other values with these ``bounds``."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the lines. ``labels``: additional ones, each followed by a comma."""
        total, alone = 0, f"{{{labels[:-1]}}}"
        yield f"# TYPE {name} histogram"
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels}le="{bound}"}} {total}'
        yield f"{name}_sum{alone} {self.sum:.6f}"
        yield f"{name}_count{alone} {total}"


class Metrics:
    """Counters of requests and tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._first_token = Histogram()
        self._between_tokens = Histogram()
        self._whole = Histogram()
        self._prompts = Histogram(_TOKENS)
        self._answers = Histogram(_TOKENS)

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first_token.add(seconds)

    def next_token(self, seconds: float) -> None:
        """Record the time since the previous token of a request."""
        with self._lock:
            self._between_tokens.add(seconds)

    def computed(self, prompt_tokens: int, new_tokens: int) -> None:
        """Record a request that the generator has finished."""
        with self._lock:
            self._tokens["prompt"] += prompt_tokens
            self._tokens["generated"] += new_tokens
            self._prompts.add(prompt_tokens)
            self._answers.add(new_tokens)

    def finished(self, reason: str, seconds: float) -> None:
        """Record a request that has ended for its client."""
        with self._lock:
            self._finished[reason] += 1
            self._whole.add(seconds)

    def lines(self, now: Mapping[str, float], model: str) -> Iterator[str]:
        """Yield our metrics, then those of vLLM with the same meaning, each after its type. ``now``: current values by
        name."""
        labels = f'model_name="{_escaped(model)}",'
        with self._lock:
            totals = {"requests": ("reason", self._finished), "tokens": ("kind", self._tokens)}
            for name, (kind, counts) in totals.items():
                yield f"# TYPE deepspeed_{name}_total counter"
                for key, count in sorted(counts.items()):
                    yield f'deepspeed_{name}_total{{{labels}{kind}="{key}"}} {count}'
            yield from self._first_token.lines("deepspeed_time_to_first_token_seconds", labels)
            yield from self._between_tokens.lines("deepspeed_time_between_tokens_seconds", labels)
            yield from self._whole.lines("deepspeed_request_seconds", labels)
            for name, value in now.items():
                yield from _value(f"deepspeed_{name}", "gauge", labels, value)
            yield from self._as_vllm(now, f'{labels}engine="0",')

    def _as_vllm(self, now: Mapping[str, float], labels: str) -> Iterator[str]:
        """Yield the metrics that dashboards for vLLM query."""
        used = 1 - now.get("free_blocks", 1) / max(1, now.get("blocks", 1))
        for name, value in (
            ("num_requests_running", now.get("running", 0)),
            ("num_requests_waiting", now.get("waiting", 0)),
            ("kv_cache_usage_perc", used),
            ("gpu_cache_usage_perc", used),  # its former name
        ):
            yield from _value(f"vllm:{name}", "gauge", labels, value)
        for name, key in (("prompt_tokens", "prompt"), ("generation_tokens", "generated")):
            yield from _value(f"vllm:{name}_total", "counter", labels, self._tokens[key])
        for name, key in _COUNTERS.items():
            yield from _value(f"vllm:{name}", "counter", labels, now.get(key, 0))
        yield "# TYPE vllm:request_success_total counter"
        for reason, count in sorted(self._finished.items()):
            label = _REASONS.get(reason, reason)
            yield f'vllm:request_success_total{{{labels}finished_reason="{label}"}} {count}'
        for name, histogram in (
            ("time_to_first_token_seconds", self._first_token),
            ("inter_token_latency_seconds", self._between_tokens),
            ("time_per_output_token_seconds", self._between_tokens),  # its former name
            ("e2e_request_latency_seconds", self._whole),
            ("request_prompt_tokens", self._prompts),
            ("request_generation_tokens", self._answers),
        ):
            yield from histogram.lines(f"vllm:{name}", labels)


def page_of(models: Mapping[str, tuple[Metrics, Mapping[str, float]]]) -> str:
    """Return the page of models: name -> (metrics, current values). Samples of one name are adjacent, as the format
    requires."""
    families: dict[str, list[str]] = {}
    for name, (metrics, now) in models.items():
        family: list[str] = []
        for line in metrics.lines(now, name):
            if line.startswith("#"):
                family = families.setdefault(line, [])
            else:
                family.append(line)
    return "".join(f"{line}\n" for kind, samples in families.items() for line in (kind, *samples))


_REASONS = {"cancelled": "abort", "failed": "error"}
_COUNTERS = {
    "num_preemptions_total": "preemptions",
    "prefix_cache_queries_total": "looked_up_tokens",
    "prefix_cache_hits_total": "shared_tokens",
    "spec_decode_num_drafts_total": "drafts",
    "spec_decode_num_draft_tokens_total": "proposed_tokens",
    "spec_decode_num_accepted_tokens_total": "accepted_tokens",
}


def _value(name: str, kind: str, labels: str, value: float) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    yield f"{name}{{{labels[:-1]}}} {value:.15g}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
