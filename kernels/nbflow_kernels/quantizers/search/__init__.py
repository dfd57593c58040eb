"""Quantizers that search for the parameters of least error."""
