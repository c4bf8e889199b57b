"""Hostfiles and the include and exclude grammar: documented examples, and what must be refused."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict

import pytest

from deepspeed.tools.launcher import runner
from deepspeed.tools.launcher.hostfile import (
    _parse_hostfile,
    apply_num_nodes_and_gpus,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_range_list,
    parse_ranges,
    parse_resource_filter,
)

POOL = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


def test_hostfile_keeps_order_and_skips_comments(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# cluster\nworker-1 slots=2\n\n  worker-0.site.org   slots=16  # big one\n")
    assert fetch_hostfile(str(path)) == OrderedDict([("worker-1", 2), ("worker-0.site.org", 16)])
    assert list(fetch_hostfile(str(path)) or ()) == ["worker-1", "worker-0.site.org"]


def test_missing_hostfile_is_none():
    assert fetch_hostfile("/does/not/exist") is None


@pytest.mark.parametrize(
    "lines, named",
    [
        (["worker-0"], "worker-0"),
        (["worker-0 slots=x"], "slots=x"),
        (["worker-0 slots=1 max_slots=2"], "max_slots"),
        (["worker-0 slots=1", "worker-0 slots=2"], "repeats host"),
        (["worker-0 slots=0"], "line 1, 'worker-0 slots=0': a host needs at least one slot"),
        (["worker-0 slots=99999999999"], "at most 4096 slots"),
        ([f"worker-0 slots={'9' * 5000}"], "at most 4096 slots"),
        ([], "no host"),
        (["# only a comment"], "no host"),
    ],
)
def test_bad_hostfile_is_refused(lines, named):
    with pytest.raises(ValueError, match=named):
        _parse_hostfile(lines)


@pytest.mark.parametrize(
    "include, exclude, left",
    [
        ("", "", POOL),
        ("worker-1", "", {"worker-1": [0, 1, 2, 3]}),
        ("worker-0@worker-1:0,2", "", {"worker-0": [0, 1, 2, 3], "worker-1": [0, 2]}),
        ("worker-1:3,1", "", {"worker-1": [3, 1]}),
        ("worker-1:1-3", "", {"worker-1": [1, 2, 3]}),
        ("", "worker-1", {"worker-0": [0, 1, 2, 3]}),
        ("", "worker-1:0,2@worker-0", {"worker-1": [1, 3]}),
        ("", "worker-0@worker-1", {}),
    ],
)
def test_filters(include, exclude, left):
    assert parse_resource_filter(POOL, include_str=include, exclude_str=exclude) == left


@pytest.mark.parametrize(
    "include, exclude, named",
    [
        ("worker-0", "worker-1", "mutually exclusive"),
        ("jeff", "", "jeff"),
        ("", "worker-0:7", "No slot '7' specified on host 'worker-0'"),
        ("worker-0:1:2", "", "1:2"),
        ("worker-0:", "", "worker-0:"),
        ("worker-0:3-1", "", "is reversed"),
    ],
)
def test_bad_filters_are_refused(include, exclude, named):
    with pytest.raises(ValueError, match=named):
        parse_resource_filter(POOL, include_str=include, exclude_str=exclude)


@pytest.mark.parametrize(
    ("include", "slots"),
    [
        ("worker-0:1,1", [1]),
        ("worker-0:1,0-1", [1, 0]),
        ("worker-0:1@worker-0:0", [1, 0]),
        ("worker-0:1@worker-0:0,1", [0, 1]),
        ("worker-0@worker-0:1", [0, 1]),
        ("worker-0:1@worker-0", [0, 1]),
    ],
)
def test_what_is_said_of_a_host_adds_up(include: str, slots: list[int]) -> None:
    assert parse_resource_filter({"worker-0": [0, 1], "worker-1": [0]}, include) == {"worker-0": slots}
    left = parse_resource_filter({"worker-0": [0, 1], "worker-1": [0]}, exclude_str=include)
    assert left.get("worker-0", []) == [slot for slot in (0, 1) if slot not in slots]


def test_inclusion_exclusion_takes_slot_counts():
    assert parse_inclusion_exclusion({"a": 3}, "", "a:1") == {"a": [0, 2]}
    assert parse_inclusion_exclusion(fetch_hostfile("/does/not/exist") or {"localhost": 2}, "", "") == {
        "localhost": [0, 1]
    }


def test_more_hosts_or_slots_than_there_are():
    """Not as many as there are, silently."""
    pool = {"worker-0": [0, 1], "worker-1": [0]}
    assert apply_num_nodes_and_gpus(pool, 2, 1) == {"worker-0": [0], "worker-1": [0]}
    with pytest.raises(ValueError, match="--num_nodes=5: only 2 hosts available .worker-0, worker-1."):
        apply_num_nodes_and_gpus(pool, 5, -1)
    with pytest.raises(ValueError, match="--num_gpus=2: host 'worker-1' has only 1 slot(\n|$)"):
        apply_num_nodes_and_gpus(pool, -1, 2)
    with pytest.raises(ValueError, match="at most 5 digits"):
        parse_ranges("0-99999999999")


def test_node_specs():
    assert parse_node_config("worker-0:0,2") == ("worker-0", [0, 2])
    assert parse_node_config_list(["a:1", "b"]) == {"a": [1], "b": []}
    assert parse_range_list("1,3-5,7") == [1, 3, 4, 5, 7]


def test_world_info_is_url_safe_base64_of_json():
    encoded = runner.encode_world_info({"localhost": [0, 1]})
    assert json.loads(base64.urlsafe_b64decode(encoded)) == {"localhost": [0, 1]}


def test_documented_names():
    assert runner.DLTS_HOSTFILE == "/job/hostfile"
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert runner.fetch_hostfile is fetch_hostfile
