"""SuperOffload: host updates that run ahead of the step's validation (``runtime/zero/offload/speculation.py``)."""
