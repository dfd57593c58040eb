"""Toolkit of the CPU kernels: compiling, threads, SIMD vectors and register tiles."""
