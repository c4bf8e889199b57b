"""The pipeline engine: runs whole batches through all stages."""
