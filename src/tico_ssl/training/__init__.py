"""The loop, its checkpoints and its monitor."""
