"""Parts of an exact resume; ``callbacks/exact_resume.py`` puts them together."""
