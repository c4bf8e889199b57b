"""The `nebula` section (checkpoints through Azure Nebula)."""

from __future__ import annotations

from pydantic import Field

from deepspeed.config.section import Int, LenientConfigModel


class DeepSpeedNebulaConfig(LenientConfigModel):
    """Asynchronous checkpoints of the Nebula service."""

    enabled: bool = Field(default=False, description="Turn it on.")
    persistent_storage_path: str | None = Field(default=None, description="Folder of the kept checkpoints.")
    persistent_time_interval: Int = Field(
        default=100, ge=1, description="Seconds between two kept checkpoints."
    )
    num_of_version_in_retention: Int = Field(default=2, ge=1, description="How many are kept.")
    enable_nebula_load: bool = Field(default=True, description="Load through the service.")
    nebula_load_path: str | None = Field(default=None, description="Folder to load from.")
