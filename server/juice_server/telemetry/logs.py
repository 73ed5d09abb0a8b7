"""The log on standard error: a line for people, or one JSON object."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]
# Loggers for operators, heard from "info" on; other libraries are heard from "warning" on.
LOUD = ("juice", "juice_server")
HEARD = (*LOUD, "uvicorn.error", "asyncio", "opentelemetry")
# vLLM's processes set up their logs by themselves.
VLLM_LOGGING = Path(__file__).with_name("vllm_logging.json")
LOG = logging.getLogger("juice_server")


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message and any extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """A line to read: time, level, message and any extra fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields: dict[str, Any] = getattr(record, "fields", {})
        extra = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
        line = f"{moment} {record.levelname.lower()}: {record.getMessage()} {extra}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up(log_format: LogFormat) -> None:
    """Write the log to standard error; as JSON, every line that Python's logging writes."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    if log_format == "json":
        _take_over(handler)
    for name in HEARD:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name in LOUD else logging.WARNING)


def _take_over(handler: logging.Handler) -> None:
    """Send all to one handler: other libraries' messages, warnings, uncaught exceptions."""
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(VLLM_LOGGING))
    sys.excepthook = _report
    threading.excepthook = lambda hook: _report(hook.exc_type, hook.exc_value, hook.exc_traceback)


def _report(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    LOG.critical("uncaught exception", exc_info=(kind, error or kind(), trace))


def _plain(value: Any) -> str:
    """Return a value as it is where it is one word, else as JSON."""
    if isinstance(value, str) and value and not re.search(r'[\s"=]', value):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
