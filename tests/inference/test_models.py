"""Names of adapters while they are loaded, from several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deepspeed.inference.serving.models import Models


def test_a_name_is_taken_while_its_adapter_is_loaded() -> None:
    entered, leave = threading.Event(), threading.Event()

    def load(folder: str) -> Any:
        entered.set()
        assert leave.wait(30)
        if folder == "bad":
            raise OSError("it cannot be read")
        return folder

    models = Models("base", 100, load)
    thread = threading.Thread(target=models.add, args=("a", "first"))
    thread.start()
    assert entered.wait(30)
    for anew in (False, True):
        with pytest.raises(ValueError, match="taken"):
            models.add("a", "second", anew=anew)
    leave.set()
    thread.join(30)
    assert models.find("a") == "first"
    with pytest.raises(ValueError, match="cannot be read"):
        models.add("b", "bad")
    models.add("b", "good")
    assert models.find("b") == "good"


def test_adapters_are_limited() -> None:
    models = Models("base", 100, str)
    for index in range(64):
        models.add(f"adapter {index}", "folder")
    with pytest.raises(ValueError, match="there are 64 adapters, the most that are kept"):
        models.add("more", "folder")
    models.add("adapter 3", "other", anew=True)
    models.remove("adapter 5")
    models.add("more", "folder")
