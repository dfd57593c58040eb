"""Checks and tables of ops and formats."""
