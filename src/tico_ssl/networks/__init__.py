"""Backbones by name, projector, target, weight standardisation and batch statistics over processes."""
