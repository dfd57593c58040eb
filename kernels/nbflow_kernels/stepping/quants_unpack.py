"""Twin of the intrinsic of `nbflow_kernels.quants.unpack`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def value_table(form: Any) -> NDArray[np.uint8]:
    """Return the form's values plus 128, 16 of them, 4 times."""
    values = np.array(form.values, np.int32) + 128
    return np.tile(np.resize(values, 16).astype(np.uint8), 4)
