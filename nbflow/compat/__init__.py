"""Compatibility with other engines; the command line alone imports it."""
