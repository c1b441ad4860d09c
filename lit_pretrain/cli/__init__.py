"""Room not furnished yet."""
