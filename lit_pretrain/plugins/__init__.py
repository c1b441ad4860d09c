"""Precision plugins: none yet; bf16 is Lightning's own autocast until then."""
