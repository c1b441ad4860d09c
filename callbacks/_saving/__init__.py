"""Files of a run: which are written, which stay, and that every rank hears when one fails."""
