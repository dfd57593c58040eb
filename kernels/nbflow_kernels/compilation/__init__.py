"""Compilation of kernels: the cache of compiled code, its locks, and shortcuts of Numba."""
