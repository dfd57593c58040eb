"""Inferflow's service files, protocol, query templates and decoding strategies."""
