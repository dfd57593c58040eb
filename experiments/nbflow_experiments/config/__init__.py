"""Sweep files and command-line axes: from text to validated points with stable ids."""
