"""Writers of training curves to monitoring backends."""
