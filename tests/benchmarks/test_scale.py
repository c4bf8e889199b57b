"""The work of one rank does not grow with the number of ranks: counts of ``benchmarks/scale.py`` for 64 and 1,024."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FEW, MANY = 64, 1024
COUNT = f"""
import json, scale, torch
torch.set_num_threads(1)
rows = [scale.measure(n, s, "tiny", mics=m, steps=1) for s, m in ((1, False), (2, False), (3, False), (3, True))
        for n in ({FEW}, {MANY})]
print(json.dumps(rows))
"""
Row = dict[str, Any]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Row, Row]]:
    """One row for few ranks and one for many, by stage and for MiCS."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT], cwd=BENCHMARKS, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    return list(zip(rows[::2], rows[1::2], strict=True))


def test_groups_and_collectives_are_the_same(pairs: list[tuple[Row, Row]]) -> None:
    for few, many in pairs:
        assert many["groups"] == few["groups"]
        assert many["groups"] <= (4 if many["mics"] else 2 if many["stage"] == 3 else 1)
        assert many["collectives"] == few["collectives"]
        assert many["start_collectives"] == few["start_collectives"]
        assert many["first_step_fetches"] == few["first_step_fetches"] and not many["later_fetches"]
        for what in ("save_messages", "load_messages", "rank_0_messages"):
            assert many[what] == few[what]
            assert not {"all_gather_object", "gather_object", "all_gather"} & many[what].keys()


def sent(by_kind: dict[str, int]) -> int:
    """Without broadcasts, where the counter of the source stands for all ranks, which pass the bytes on."""
    return sum(count for kind, count in by_kind.items() if kind != "broadcast")


def test_bytes_sent_and_kept_do_not_grow(pairs: list[tuple[Row, Row]]) -> None:
    """(N - 1) / N of the data and its padding: buckets are padded to 64 bytes per rank."""
    for few, many in pairs:
        padding = 2 * 64 * MANY * 12  # on each way of each of at most a dozen buckets
        assert sent(many["sent"]) <= 1.05 * sent(few["sent"]) + padding
        assert sent(many["start_sent"]) <= 1.05 * sent(few["start_sent"]) + padding
        assert many["state_bytes"] <= few["state_bytes"]
        assert many["gradient_bytes"] <= few["gradient_bytes"]


def test_a_rank_writes_and_opens_its_own_files(pairs: list[tuple[Row, Row]]) -> None:
    for few, many in pairs:
        for row in (few, many):
            rank = row["ranks"] // 2 + 1
            own = {name for name in row["written"] if f"pp_rank_{rank}_" in name}
            assert own == row["written"].keys() and len(own) == (2 if row["stage"] == 3 else 1)
            others = set(row["opened"]) - own
            assert len(others) == 1 + row["mics"]  # the first file; who wrote what it has a replica of
        assert sum(many["written"].values()) <= sum(few["written"].values()) + 2000
        assert many["first_file_bytes"] <= few["first_file_bytes"] + 2000
        assert sum(many["rank_0_written"].values()) <= sum(few["rank_0_written"].values()) + 2000
        assert many["read"] <= few["read"] + 2000


def test_a_replica_is_not_written(pairs: list[tuple[Row, Row]]) -> None:
    (few, many) = next(pair for pair in pairs if pair[0]["mics"])
    owner = sum(few["rank_0_written"].values())
    assert sum(many["written"].values()) < sum(few["written"].values()) + 2000 < 0.6 * owner
