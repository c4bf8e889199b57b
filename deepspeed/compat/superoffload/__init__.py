"""SuperOffload: host updates that run ahead of the step's validation (``zero/offload/speculation.py``)."""
