"""Threads of a launch: numbers, addresses, special registers and the order of their accesses."""
