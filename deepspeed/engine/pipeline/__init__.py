"""The engine of a pipeline: whole batches through all stages."""
