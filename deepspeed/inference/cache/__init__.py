"""The paged cache of keys and values: who has which block (`blocks.py`), and the tensors (`pages.py`)."""
