"""Benchmarks of ops, formats and GPUs, and the roofline they are compared with."""
