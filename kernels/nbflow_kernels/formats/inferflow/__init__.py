"""Inferflow's weight formats."""
