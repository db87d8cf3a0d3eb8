"""This package in the frames of others: Lightning (`integrations.lightning`), scikit-learn (`integrations.sklearn`). Each
module needs the library of its name."""
