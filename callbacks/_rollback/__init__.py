"""What goes back when a spike is taken back, and what decides it; ``callbacks/rollback.py`` puts it together."""
