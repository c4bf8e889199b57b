"""ZenFlow: important columns are updated every step, the others in rounds (``zero/offload/zenflow.py``)."""
