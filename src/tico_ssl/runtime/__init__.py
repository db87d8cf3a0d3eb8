"""The ground floor: errors, files, randomness, processes, the device."""
