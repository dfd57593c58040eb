"""The file of a run: one line of JSON per result, appended as it comes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

NAME = "first_run.jsonl"
NO_TIME = "no time"
"""Status of a section that was not begun; a later run begins it."""


class Journal:
    """The results of the runs in a folder.

    Parameters
    ----------
    folder : Path
        The folder, which must exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.sections: dict[str, list[dict[str, Any]]] = {}
        """Results of each section since it was last begun."""
        self.ends: dict[str, dict[str, Any]] = {}
        """Last line of each finished section."""
        self._lock = threading.Lock()
        text = self.path.read_bytes() if self.path.exists() else b""
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # cut off in the middle
                self._note(json.loads(line))
        if text and not text.endswith(b"\n"):
            with self.path.open("ab") as file:
                file.write(b"\n")

    def add(self, section: str, event: str, **values: Any) -> None:
        """Append a line; `event` is ``begin``, ``row`` or ``end``."""
        said = {"section": section, "event": event, "at": round(time.time(), 3), **values}
        with self._lock:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")
            self._note(said)

    def _note(self, said: Any) -> None:
        if not isinstance(said, dict) or not isinstance(said.get("section"), str):
            return
        section, event = said["section"], said.get("event")
        if event == "begin":
            self.sections[section] = []
            self.ends.pop(section, None)
        elif event == "row":
            self.sections.setdefault(section, []).append(said)
        elif event == "end":
            self.ends[section] = said

    def is_finished(self, section: str) -> bool:
        """Return whether a section has run to its end, whatever that was."""
        return bool(self.ends.get(section, {}).get("status", NO_TIME) != NO_TIME)
