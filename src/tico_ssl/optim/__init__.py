"""Optimisers, parameter groups and schedules."""

from tico_ssl.optim.groups import OptimizerConfig, build_optimizer, set_learning_rate
from tico_ssl.optim.lars import LARS
