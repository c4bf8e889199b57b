"""Names of models and adapters; of adapters while they are loaded, from several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deepspeed.inference.serving.models import ModelError, Models, ServedModel
from deepspeed.inference.serving.service import Service
from tests.inference.standin import Parrot, served


def test_a_name_is_taken_while_its_adapter_is_loaded() -> None:
    entered, leave = threading.Event(), threading.Event()

    def load(folder: str) -> Any:
        entered.set()
        assert leave.wait(30)
        if folder == "bad":
            raise OSError("it cannot be read")
        return folder

    models = Models([served(Service(Parrot()), load_adapter=load)])
    thread = threading.Thread(target=models.add, args=("a", "first"))
    thread.start()
    assert entered.wait(30)
    for anew in (False, True):
        with pytest.raises(ValueError, match="taken"):
            models.add("a", "second", anew=anew)
    leave.set()
    thread.join(30)
    assert models.find("a")[1] == "first"
    with pytest.raises(ValueError, match="cannot be read"):
        models.add("b", "bad")
    models.add("b", "good")
    assert models.find("b")[1] == "good"


def test_adapters_are_limited() -> None:
    models = Models([served(Service(Parrot()), load_adapter=str)])
    for index in range(64):
        models.add(f"adapter {index}", "folder")
    with pytest.raises(ValueError, match="there are 64 adapters loaded, the maximum"):
        models.add("more", "folder")
    models.add("adapter 3", "other", anew=True)
    models.remove("adapter 5")
    models.add("more", "folder")


def test_an_adapter_that_is_removed_while_models_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models([served(Service(Parrot()), load_adapter=str)])
    for name in ("a", "b"):
        models.add(name, f"/{name}")
    kind = ServedModel.type.fget
    assert kind is not None

    def removing(model: ServedModel) -> str:
        if len(models._adapters) == 2:
            models.remove("b")
        return kind(model)

    monkeypatch.setattr(ServedModel, "type", property(removing))
    assert [each["id"] for each in models.described()][:2] == ["parrot", "a"]
    assert [each["id"] for each in models.described()] == ["parrot", "a"]


def test_adapters_belong_to_one_of_several_models() -> None:
    first = served(Service(Parrot()), name="first", load_adapter=lambda folder: f"of first: {folder}")
    second = served(Service(Parrot()), name="second", load_adapter=lambda folder: f"of second: {folder}")
    plain = served(Service(Parrot()), name="plain", max_length=8)
    models = Models([first, second, plain])
    models.add("a", "/a")
    models.add("b", "/b", "second")
    assert models.find("") == models.find("first") == (first, None) and models.find("plain") == (plain, None)
    assert models.find("a") == (first, "of first: /a") and models.find("b") == (second, "of second: /b")
    listed = {each["id"]: (each["parent"], each["max_model_len"]) for each in models.described()}
    assert listed == {
        "first": (None, 1024),
        "second": (None, 1024),
        "plain": (None, 8),
        "a": ("first", 1024),
        "b": ("second", 1024),
    }
    for name in ("second", "a"):
        with pytest.raises(ValueError, match="taken"):
            models.add(name, "/c")
    with pytest.raises(ValueError, match="'plain' does not support adapters"):
        models.add("c", "/c", "plain")
    with pytest.raises(ModelError, match="no model 'a'; available: 'first', 'second', 'plain'"):
        Models([first, second, plain]).add("c", "/c", "a")
    for names in (("first", "first"), ("first", "")):
        with pytest.raises(ValueError, match="different names"):
            Models([served(Service(Parrot()), name=name) for name in names])
