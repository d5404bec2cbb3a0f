"""Configuration of the HTTP server; the flags are generated from it as from the engine's."""

from dataclasses import dataclass

from requant.engine.config import option
from requant.engine.logs import LEVELS
from requant.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, and what it calls the model."""

    host: str = option("0.0.0.0", "address to listen on; 127.0.0.1: this machine alone")
    server_port: int = option(8000, "HTTP port (0: a free one)")
    served_model_name: tuple[str, ...] = option((), "names that requests may use for the model (default: --model)")
    chat_template: str | None = option(None, "Jinja chat template, or a file with one (default: the tokenizer's)")
    log_level: str = option("info", "least severe messages to log", choices=LEVELS)

    def __post_init__(self) -> None:
        """Refuse what cannot be listened on."""
        if not 0 <= self.server_port <= 65535:
            raise ConfigError(f"--server-port is {self.server_port}; accepted: 0 to 65535")
        if self.log_level not in LEVELS:
            raise ConfigError(f"--log-level is {self.log_level!r}; accepted: {', '.join(LEVELS)}")
