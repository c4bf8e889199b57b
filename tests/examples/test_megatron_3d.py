"""The example of 3D parallelism in a short form: its checkpoint resumes with another layout of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.checkpoint.foreign.universal_export import convert
from tests.examples.scripts import script
from tests.pool import run

SHORT = "--stages 2 --blocks 2 --batch 4 --steps".split()


def trained(arguments: list[str]) -> dict[str, float]:
    return script("megatron_3d").main(arguments)


def test_it_goes_on_with_fewer_parts(tmp_path: Path) -> None:
    split = run(trained, 4, arguments=["--parts", "2", *SHORT, "3", "--save", str(tmp_path)])[0]
    joined = run(trained, 2, arguments=["--parts", "1", *SHORT, "1", "--load", str(tmp_path)])[0]
    assert split["last"] < split["first"] and joined["begun"] == 3
    assert joined["first"] == pytest.approx(split["last"], abs=1e-5)


def test_a_universal_checkpoint_of_both_stages(tmp_path: Path) -> None:
    """Converted, it loads where one stage has all layers; data restart, since the layout does not record them."""
    split = run(trained, 4, arguments=["--parts", "2", *SHORT, "3", "--save", str(tmp_path)])[0]
    convert(tmp_path / "global_step3", tmp_path / "universal")
    given = ["--parts", "2", *SHORT, "3", "--stages", "1", "--load", str(tmp_path), "--universal"]
    universal = run(trained, 2, arguments=given)[0]
    assert universal["begun"] == 3 and universal["first"] == pytest.approx(split["last"], abs=1e-5)
    assert universal["last"] < universal["first"]


@pytest.mark.slow
def test_two_of_each(tmp_path: Path) -> None:
    cube = run(trained, 8, arguments=["--parts", "2", *SHORT, "3", "--save", str(tmp_path)])[0]
    line = run(trained, 2, arguments=["--parts", "1", *SHORT, "1", "--load", str(tmp_path)])[0]
    assert line["first"] == pytest.approx(cube["last"], abs=1e-5)
