"""Augmented views: pixel operations, and one batched executor for CPU and GPU."""
