"""Stage 3: parameters that exist as shards and are gathered around their use.

`parameter_offload.py` hooks the modules, `coordinator.py` knows what each call needs, `transitions.py` decides when a
bucket is gathered and resharded, `scheduled_gather.py` (several ranks) and `gather.py` move the shards.
"""
