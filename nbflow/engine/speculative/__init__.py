"""Speculative decoding: draft tokens and rejection sampling."""
