"""The smallest run that the tests train."""

TINY = {
    "data.limit": 96,
    "data.image_size": 16,
    "backbone.name": "tico/resnet10-w4",
    "method.hidden": 16,
    "method.dim": 8,
    "training.batch_size": 32,
    "training.epochs": 3,
    "training.precision": "fp32",
    "training.log_every_steps": 1,
    "training.knn_every_epochs": 0,
}
"""Overrides that make the demo recipe a matter of seconds, and its arithmetic exact to compare."""
