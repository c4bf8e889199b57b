"""Stage 3: parameters that exist as shards and are gathered around their use.

`parameter_offload.py` hooks the modules, `coordinator.py` knows what each call needs, `transitions.py` decides when a
bucket is gathered and resharded, `scheduled_gatherer.py` (several ranks) and `gatherers.py` move the shards.
"""
