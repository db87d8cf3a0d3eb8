"""Optimisers, parameter groups and schedules."""
