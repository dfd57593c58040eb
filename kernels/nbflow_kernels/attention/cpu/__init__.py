"""Attention on the CPU: one kernel for prefill and decode, its scheduler and its launches."""
