"""Specifications as data: families, models and machines in TOML; the bundled checkpoints."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parent
FAMILIES = _ROOT / "families"
"""Model families: how an architecture is composed, how its tensors and config keys are called."""
MODELS = _ROOT / "models"
"""Released models: sizes, chat templates and what their checkpoints may lack."""
MACHINES = _ROOT / "machines"
"""Machines for the partition planner: bandwidths, rates and links."""
CHECKPOINTS = _ROOT / "checkpoints"
"""Weights and tokenizers of the bundled models."""
