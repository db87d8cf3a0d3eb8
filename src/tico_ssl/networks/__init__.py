"""Backbones by name, projector, target, weight standardisation, fused blocks, global batch statistics."""
