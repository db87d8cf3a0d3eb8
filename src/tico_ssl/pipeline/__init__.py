"""From sources and views to batches on the device."""
