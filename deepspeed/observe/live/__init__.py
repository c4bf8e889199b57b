"""The live page of a run (`"monitor": {"live": true}`), the record behind it, and `ds top`."""
