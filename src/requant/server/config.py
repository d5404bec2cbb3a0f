"""Configuration of the HTTP server; the flags are generated from it as from the engine's."""

from dataclasses import dataclass

from requant.engine.logs import LEVELS
from requant.flags import check, option


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
        check(0 <= self.server_port <= 65535, "server_port", self.server_port, "0 to 65535")
        check(self.log_level in LEVELS, "log_level", self.log_level, ", ".join(LEVELS))
