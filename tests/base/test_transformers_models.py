"""Errors for a model that Transformers does not find."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.base.transformers_models import why_not_loaded


def test_a_path_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    error = OSError("Repo id must be in the form of something\nand more")
    for name in ("./model", "../model", "/some/where/model", "runs/7/model", "~/model", "a/b/", ".hidden"):
        assert why_not_loaded(name, error) == "no such folder", name
    for name in ("model", "some/model", "org/model-7.b_2"):
        said = why_not_loaded(name, error)
        assert (
            said
            == "no such folder; tried as a model name on the hub: Repo id must be in the form of something"
        ), name
    assert why_not_loaded("file", error).startswith("this is a file")
    assert why_not_loaded("folder", error) == str(error)
