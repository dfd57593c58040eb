"""The published quantizers, bit for bit."""
