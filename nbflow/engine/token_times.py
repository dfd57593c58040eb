"""Times at which the requests of a worker get their tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nbflow.distributed.comm import Comm
from nbflow.engine.outputs import RequestDelta


class TokenTimes:
    """Recorder of token times of one rank, for `nbflow.benchmark.timing`; off by default.

    Times are seconds since `record_token_times`.  The tokens of a multi-step decode, which Python
    sees all at once, are spread evenly over it.
    """

    comm: Comm
    _token_times: dict[int, list[float]] | None = None
    _recording_from = 0.0

    def record_token_times(self) -> dict[str, Any]:
        """Start to record; drops what was recorded before."""
        self._token_times, self._recording_from = {}, time.perf_counter()
        return {}

    def token_times(self) -> dict[str, Any]:
        """Return the recorded times of each request, and whether this rank leads; stop recording.

        Every rank of a replica sees the same tokens: the leading rank stands for all.
        """
        times, self._token_times = self._token_times or {}, None
        return {"leads": self.comm.rank == 0, "times": list(times.values())}

    def _note_tokens(self, deltas: Sequence[RequestDelta], started: float) -> None:
        """Record the tokens of a step that began at `started` and has just ended."""
        if self._token_times is None:
            return
        first, last = (t - self._recording_from for t in (started, time.perf_counter()))
        for delta in deltas:
            n = len(delta.tokens)
            times = self._token_times.setdefault(delta.request.id, [])
            times += [first + (i + 1) / n * (last - first) for i in range(n)]
