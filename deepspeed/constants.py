"""Process-wide constants that clients import (`deepspeed.constants`)."""

from __future__ import annotations

import os
from datetime import timedelta

# Port of the rendezvous on rank 0's host when nothing else names one.
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

# Environment variables that MPI-like launchers and AzureML set: rank and size across nodes.
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"

# Longest that a collective may take before its process group gives up; DEEPSPEED_TIMEOUT is in minutes.
default_pg_timeout = timedelta(minutes=int(os.getenv("DEEPSPEED_TIMEOUT", default="10")))

INFERENCE_GENERIC_MODE = "generic"
INFERENCE_SPECIALIZED_MODE = "specialized"
