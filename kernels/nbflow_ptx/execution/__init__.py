"""Execution of a kernel: basic blocks of bound instructions and the warp scheduler."""
