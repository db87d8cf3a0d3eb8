"""What the evaluations with labels share: which images count, how a classifier is trained on them, how it is scored.

The protocols themselves, with their settings, are the files of `evaluations/`.
"""
