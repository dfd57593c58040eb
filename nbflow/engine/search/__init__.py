"""Beam search and contrastive search: several sequences per request."""

from __future__ import annotations

from nbflow.engine.search.base import Search
from nbflow.engine.search.beam import BeamSearch
from nbflow.engine.search.contrastive import ContrastiveSearch

__all__ = ["BeamSearch", "ContrastiveSearch", "Search"]
