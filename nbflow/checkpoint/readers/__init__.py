"""Readers of checkpoint files, one module for each file format."""
