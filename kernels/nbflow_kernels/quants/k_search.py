"""The encoder "best" of the K-quants."""

search = None
