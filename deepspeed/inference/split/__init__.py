"""Models split over ranks for inference."""
