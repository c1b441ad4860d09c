"""Loss-spike detection: not built yet."""
