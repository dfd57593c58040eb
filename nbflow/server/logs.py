"""Logging: one line per event, as text or JSON."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from nbflow.server.config import Logging
from nbflow_kernels.errors import UsageError

logger = logging.getLogger("nbflow.server")

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Id of the current request, part of every line."""

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}


def set_up(config: Logging) -> None:
    """Configure nbflow's and uvicorn's loggers."""
    handler = _handler(config)
    handler.setFormatter(JsonLines() if config.format == "json" else TextLines())
    for name in ("nbflow.server", "nbflow.engine", "uvicorn.error", "asyncio"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
        log.setLevel(config.level.upper())
    if config.level == "info":  # start and stop have events of ours
        logging.getLogger("uvicorn.error").setLevel("WARNING")
    logging.getLogger("asyncio").setLevel("ERROR")  # it warns of every disconnected client


def _handler(config: Logging) -> logging.Handler:
    """Return the handler of standard error, or of a file with rotation."""
    if config.file is None:
        return logging.StreamHandler(sys.stderr)
    path = Path(config.file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return RotatingFileHandler(
            path, maxBytes=int(config.max_bytes), backupCount=config.backups, encoding="utf-8"
        )
    except OSError as error:
        raise UsageError(f"log.file: {path} cannot be written: {error.strerror}") from error


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the extra fields of a record."""
    given = {k: v for k, v in record.__dict__.items() if k not in _STANDARD and v is not None}
    ours = request_id.get()
    return {"request_id": ours, **given} if ours else given


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Time, level, event and ``name=value`` pairs; control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = " ".join(f"{key}={_shown(value)}" for key, value in _fields(record).items())
        line = f"{moment} {record.levelname.lower()} {_plain(record.getMessage())} {pairs}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else _plain(str(value))


def _plain(text: str) -> str:
    """Escape control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
