"""How fast training goes: arithmetic, and what a device could do."""
