"""What everything stands on: errors, files, randomness, processes, the device."""
