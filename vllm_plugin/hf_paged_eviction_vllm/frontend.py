"""Requests are checked against the server's sizes before they are admitted, where these are known."""

import weakref
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from .requests import RequestOptions
from .settings import settings_of

_config: "weakref.ref[Any] | None" = None


class SettingsReader(StatLoggerBase):
    """Logs nothing. vLLM gives the configuration of the server to loggers, in the process that takes in requests."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        global _config
        _config = weakref.ref(vllm_config)

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def log_engine_initialized(self) -> None:
        """Nothing."""


def check(options: RequestOptions) -> None:
    """Refuse options that this server cannot serve, if its settings are known here.

    Raises:
        ValueError: the message says what would fit.
    """
    config = None if _config is None else _config()
    settings = None if config is None else settings_of(config)
    if settings is not None:
        options.checked(settings.sizes)
