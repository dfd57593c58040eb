"""Timing of loaded models, and llama.cpp as a peer."""
