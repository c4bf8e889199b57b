"""Writers of training curves."""
