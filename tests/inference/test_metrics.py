"""The page of metrics: each series once, cumulative buckets, and the names that dashboards for vLLM ask for."""

from __future__ import annotations

import json
import re

from deepspeed.inference.serving.metrics import Metrics, page_of
from tests.pool import ROOT

SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')
NOW = {
    "running": 2,
    "waiting": 3,
    "blocks": 10,
    "free_blocks": 4,
    "preemptions": 1,
    "shared_tokens": 5,
    "looked_up_tokens": 9,
    "drafts": 2,
    "proposed_tokens": 8,
    "accepted_tokens": 6,
}


def page(metrics: Metrics, model: str = "m") -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for line in page_of({model: (metrics, NOW)}).splitlines():
        if not line.startswith("# TYPE "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            key = match[1], match[2] or ""
            assert key not in found, key
            found[key] = float(match[3])
    return found


def test_what_a_dashboard_for_vllm_asks_for() -> None:
    metrics = Metrics()
    metrics.first_token(0.04)
    for seconds in (0.002, 0.004, 1000):
        metrics.next_token(seconds)
    metrics.computed(7, 4)
    metrics.finished("stop", 2.5)
    metrics.finished("cancelled", 1)
    found, labels = page(metrics), 'model_name="m",engine="0"'
    for name, value in {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.6,
        "num_preemptions_total": 1,
        "prefix_cache_queries_total": 9,
        "prefix_cache_hits_total": 5,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 8,
        "spec_decode_num_accepted_tokens_total": 6,
        "prompt_tokens_total": 7,
        "generation_tokens_total": 4,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.04,
        "inter_token_latency_seconds_count": 3,
        "e2e_request_latency_seconds_sum": 3.5,
        "request_generation_tokens_sum": 4,
    }.items():
        assert found["vllm:" + name, labels] == value, name
    assert found["vllm:request_success_total", labels + ',finished_reason="stop"'] == 1
    assert found["vllm:request_success_total", labels + ',finished_reason="abort"'] == 1
    buckets = [
        value for (name, _), value in found.items() if name == "vllm:inter_token_latency_seconds_bucket"
    ]
    assert buckets[:3] == [0, 1, 2] and buckets == sorted(buckets) and buckets[-2:] == [2, 3]
    assert found["deepspeed_time_between_tokens_seconds_count", 'model_name="m"'] == 3


def test_samples_of_one_name_are_together() -> None:
    """The format asks for it: each type once, and behind it the samples of all models."""
    first, second = Metrics(), Metrics()
    first.finished("stop", 1.0)
    second.finished("length", 2.0)
    family, found = "", dict[str, list[str]]()
    for line in page_of({"a": (first, NOW), "b": (second, {"waiting": 5})}).splitlines():
        if line.startswith("# TYPE "):
            family = line.split()[2]
            assert family not in found
            found[family] = []
        else:
            assert line.startswith(family)
            found[family].append(line.removeprefix(family))
    assert found["deepspeed_requests_total"] == [
        '{model_name="a",reason="stop"} 1',
        '{model_name="b",reason="length"} 1',
    ]
    assert found["vllm:num_requests_waiting"] == [
        '{model_name="a",engine="0"} 3',
        '{model_name="b",engine="0"} 5',
    ]
    assert found["deepspeed_running"] == ['{model_name="a"} 2']


def test_a_name_of_a_model_is_escaped() -> None:
    labels = {key[1] for key in page(Metrics(), 'C:\\a "b"\n') if key[0] == "vllm:num_requests_running"}
    assert labels == {r'model_name="C:\\a \"b\"\n",engine="0"'}


def test_the_dashboard_asks_for_series_that_are_there() -> None:
    board = json.loads((ROOT / "examples" / "clusters" / "grafana" / "serving.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"vllm:\w+", target["expr"])
    }
    metrics = Metrics()
    metrics.finished("stop", 1.0)
    assert len(asked) > 12 and asked <= {name for name, _ in page(metrics)}


def test_large_counters_keep_their_last_digit() -> None:
    metrics = Metrics()
    metrics.computed(123_456_789, 7)
    assert page(metrics)["vllm:prompt_tokens_total", 'model_name="m",engine="0"'] == 123_456_789
