"""Geometry of features: neighbours, effective dimensions, robustness.

The protocols that report it, with their settings, are the files of `evaluations/`.
"""
