"""Frozen backbones: what they are, what they make of images, and quick ways to evaluate that."""
