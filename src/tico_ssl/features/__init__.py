"""Frozen backbones: opening them, extracting features, and quick evaluations of these features."""
