"""Requests (`request`), which rows run next (`scheduler`), one rank's work (`rank`), the user's model (`model`)."""

from nbflow.engine.model import Generation, Model, load

__all__ = ["Generation", "Model", "load"]
