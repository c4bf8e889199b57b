"""The sections of the monitors, `tensorboard` to `aim`: destinations of training curves;
`monitor`: the live page, and the x axis of the curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from deepspeed.config.section import AllowedValues, DeepSpeedConfigModel, Float, Int, key, section

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "trackio", "mlflow", "aim")


class TensorBoardConfig(DeepSpeedConfigModel):
    """Event files for TensorBoard."""

    enabled: bool = key(False, "Turn it on.")
    output_path: str | None = key(
        "", "Folder of the event files; empty: `~/tensorboard`, null: `tensorboard` where the script starts."
    )
    job_name: str = key("DeepSpeedJobName", "Folder of this run inside `output_path`.")


class WandbConfig(DeepSpeedConfigModel):
    """Weights & Biases."""

    enabled: bool = key(False, "Turn it on.")
    group: str | None = key(None, "Group that the run belongs to.")
    team: str | None = key(None, "Team (entity) that owns the run.")
    project: str = key("deepspeed", "Project of the run.")


class CSVConfig(DeepSpeedConfigModel):
    """One CSV file per curve."""

    enabled: bool = key(False, "Turn it on.")
    output_path: str | None = key(
        "", "Folder of the files; empty: `~/csv_monitor`, null: `csv_monitor` where the script starts."
    )
    job_name: str = key("DeepSpeedJobName", "Folder of this run inside `output_path`.")


class CometConfig(DeepSpeedConfigModel):
    """Comet."""

    enabled: bool = key(False, "Turn it on.")
    samples_log_interval: Int = key(100, "Samples between two points of a curve.", ge=1)
    project: str | None = key(None, "Project of the experiment.")
    workspace: str | None = key(None, "Workspace of the project.")
    api_key: str | None = key(None, "API key of the account; better kept in the environment.", repr=False)
    experiment_name: str | None = key(None, "Name shown for the experiment.")
    experiment_key: str | None = key(
        None, "Identifier of an experiment to continue or to create: 32 to 50 letters and digits."
    )
    online: bool | None = key(None, "Send at once (true) or keep files (false); null: Comet decides.")
    mode: Literal["get", "create", "get_or_create"] | None = key(
        None, "Continue an experiment, make a new one, or whichever is possible."
    )


class TrackioConfig(DeepSpeedConfigModel):
    """Trackio."""

    enabled: bool = key(False, "Turn it on.")
    project: str = key("deepspeed", "Project of the run.")


class MlflowConfig(DeepSpeedConfigModel):
    """MLflow."""

    enabled: bool = key(False, "Turn it on.")
    tracking_uri: str | None = key(
        None, "Server or folder of the runs; null: `MLFLOW_TRACKING_URI`, else MLflow's default."
    )
    experiment: str = key("deepspeed", "Experiment that the run belongs to.")
    run_name: str | None = key(None, "Name shown for the run; null: MLflow makes one.")


class AimConfig(DeepSpeedConfigModel):
    """Aim."""

    enabled: bool = key(False, "Turn it on.")
    repo: str | None = key(
        None, "Folder of the repository, or `aim://` and a server; null: `.aim` where the script starts."
    )
    experiment: str = key("deepspeed", "Experiment that the run belongs to.")


class LiveConfig(DeepSpeedConfigModel):
    """A page in the browser about this run, and the record behind it; see live.md."""

    enabled: bool = key(False, "Turn it on.")
    folder: str = key(
        "live", "Folder of the record; a resumed run continues it. Each job needs its own.", min_length=1
    )
    serve: bool = key(True, "Serve the page; false only records, for `ds live FOLDER` and `ds top`.")
    host: str = key(
        "127.0.0.1",
        "Address that the page listens at. Any but this machine's own (127.0.0.1, localhost, ::1) asks "
        "every visitor for a token.",
        min_length=1,
    )
    port: Int = key(8470, "Port of the page, or the next free one after it; 0: any free one.", ge=0, le=65535)
    peak_tflops: Float | None = key(
        None,
        "What one device can do, in TFLOP/s, for the share of it that is used (MFU); null: known for "
        "common GPUs.",
        gt=0,
    )


def _live_switch(value: Any) -> Any:
    """Expand `true` and `false` to `{"enabled": ...}`; an object without the key is enabled."""
    if isinstance(value, bool):
        return {"enabled": value}
    return {"enabled": True, **value} if isinstance(value, dict) else value


class MonitorConfig(DeepSpeedConfigModel):
    """Watching a run."""

    live: Annotated[LiveConfig, BeforeValidator(_live_switch), AllowedValues("true, false or an object")] = (
        section(LiveConfig, "The live page and its record; `true` takes the defaults.")
    )
    x: Literal["samples", "steps", "tokens"] = key(
        "samples",
        "What the engine's curves are drawn over, in all monitors; their names then begin with "
        "`Train/Samples/`, `Train/Steps/` or `Train/Tokens/`.",
    )


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The monitors together."""

    tensorboard: TensorBoardConfig = TensorBoardConfig.model_construct()
    comet: CometConfig = CometConfig.model_construct()
    wandb: WandbConfig = WandbConfig.model_construct()
    csv_monitor: CSVConfig = CSVConfig.model_construct()
    trackio: TrackioConfig = TrackioConfig.model_construct()
    mlflow: MlflowConfig = MlflowConfig.model_construct()
    aim: AimConfig = AimConfig.model_construct()
    enabled: bool = False

    @model_validator(mode="after")
    def check_enabled(self) -> DeepSpeedMonitorConfig:
        """Set `enabled` if any monitor is."""
        object.__setattr__(self, "enabled", any(getattr(self, name).enabled for name in MONITORS))
        return self


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in MONITORS if name in param_dict})
