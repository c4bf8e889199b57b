"""The documented place of the limits of the ragged engine, which are in `config_v2.py`."""
