"""The example of learning rates in a short form: the test finds limits, the cycle between them beats its lower end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.scripts import script
from tests.pool import distributed


@distributed(world_size=1)
def test_limits_and_cycle(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tuning, picture = script("lr_tuning"), tmp_path / "speed.png"
    runs = tuning.main(["--steps", "80", "--test_steps", "60", "--batch", "64", "--plot", str(picture)])
    assert picture.stat().st_size > 5000
    test, cycle, warm_up = runs["range test"], runs["1Cycle"], runs["WarmupLR"]
    assert test.rates[0] == pytest.approx(1e-4, rel=1e-3) and test.losses[-1] > min(test.losses)
    rate = tuning.found(test)
    assert 1e-4 < rate < 0.1
    assert max(cycle.rates) == pytest.approx(rate, rel=0.05) and min(cycle.rates) <= rate / 10 * 1.4
    assert max(warm_up.rates) == pytest.approx(rate / 10)
    assert cycle.smooth()[-1] < warm_up.smooth()[-1] < cycle.smooth()[0]
