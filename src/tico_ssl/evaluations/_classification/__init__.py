"""Shared by the evaluations with labels: subsets of images, training of a classifier, and its scores.

The protocols themselves, with their settings, are the files of `evaluations/`.
"""
