"""Timing, llama.cpp as a peer, and measuring a machine for the planner."""
