"""The paged KV cache: block allocation and sharing (`blocks.py`), and the tensors (`pages.py`)."""
