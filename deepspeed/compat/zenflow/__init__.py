"""ZenFlow: columns that matter at once, the others in rounds (``zero/offload/zenflow.py``)."""
