"""Emulated memory: allocations, memory spaces, checks of every access, races and profile."""
