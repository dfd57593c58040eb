"""GGML's weight formats."""
