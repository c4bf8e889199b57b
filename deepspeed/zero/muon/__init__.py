"""Muon: orthogonalized momentum for hidden matrices."""
