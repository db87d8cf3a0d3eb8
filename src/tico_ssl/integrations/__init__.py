"""This package in the frames of others, one module per library, which has its name: `lightning`, `sklearn`."""
