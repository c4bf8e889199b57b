"""ZenFlow: columns that matter at once, the others in rounds (``runtime/zero/offload/zenflow.py``)."""
