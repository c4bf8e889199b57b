"""The page of claims is what the saved results say, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import claims  # noqa: E402

ALL = [claim for section in claims.CLAIMS.values() for claim in section]


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "benchmarks" / "claims.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("claim", ALL, ids=[claim.headline[:30] for claim in ALL])
def test_a_claim_names_what_measures_it(claim: claims.Claim) -> None:
    assert claim.verdict in claims.SHOWN
    assert bool(claim.numbers) == (claim.verdict != "no number")
    assert claim.carries or claim.verdict == "no number"
    script, *options = claim.command.split() or [""]
    if script:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert all(re.search(rf'"{option}"', text) for option in options if option.startswith("--"))
    for named in re.findall(
        r"(?:benchmarks|tests)/[\w/]+(?:\.py)?", claim.carries + claim.result + claim.analog
    ):
        assert (ROOT / named).exists()
