"""Dependencies and output folders of the monitors."""

from __future__ import annotations

import importlib
import os
from types import ModuleType


def check_tb_availability() -> None:
    """Raise ImportError, with the package to install, if TensorBoard's event files cannot be written."""
    _require("tensorboard", "tensorboard")


def check_wandb_availability() -> ModuleType:
    """Return Weights & Biases' module. ImportError, with the package to install, if it is missing."""
    return _require("wandb", "wandb")


def check_comet_availability() -> None:
    """Raise ImportError, with the package to install, if Comet's is missing or too old."""
    if not hasattr(_require("comet_ml", "comet_ml"), "start"):
        raise ImportError("comet_ml is too old: pip install -U 'comet_ml>=3.43'")


def check_trackio_availability() -> ModuleType:
    """Return Trackio's module. ImportError, with the package to install, if it is missing."""
    return _require("trackio", "trackio")


def check_mlflow_availability() -> ModuleType:
    """Return MLflow's module; ``mlflow-skinny`` is enough. ImportError, with the package to install, if it is
    missing."""
    return _require("mlflow", "mlflow-skinny")


def check_aim_availability() -> ModuleType:
    """Return Aim's module. ImportError, with the package to install, if it is missing."""
    return _require("aim", "aim")


def _require(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; to enable it: pip install {package}") from error


def run_folder(output_path: str | None, job_name: str, base: str) -> str:
    """Return ``output_path/job_name``. An empty ``output_path`` means ``base``; None, a folder with the name of
    ``base`` in the working directory."""
    if output_path is None:
        output_path = os.path.join(os.getcwd(), os.path.basename(base))
    return os.path.join(os.path.expanduser(output_path) if output_path else base, job_name)
