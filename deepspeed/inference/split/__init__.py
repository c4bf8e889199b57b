"""Models whose layers are split over ranks for inference."""
