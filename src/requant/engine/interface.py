"""What a front end asks of an engine core, and how it names the function that builds one.

A front end does not import the core: it is given a :data:`CoreFactory`, by default :data:`BUILD_CORE`, so that
the server's own process stays light and tests can run a core of theirs, in a process of its own too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from requant.engine.messages import CoreRequest, StepResult


class Core(Protocol):
    """Generates tokens for requests, one step at a time."""

    def add_request(self, source: CoreRequest, /) -> None:
        """Queue a request; raises :class:`~requant.errors.RequestError` if it cannot be run."""

    def abort(self, request_ids: Iterable[str], /) -> None:
        """End requests now; ids of none are passed over."""

    def step(self) -> StepResult:
        """Run one step of the model."""
        ...

    def has_unfinished(self) -> bool:
        """Whether another step has anything to say."""
        ...


class BackgroundWork(Protocol):
    """Something that goes on beside the engine."""

    def wait(self) -> None:
        """Until it is done."""


class BuiltCore(Protocol):
    """A core that is ready, with what the front end has to know of its model."""

    @property
    def core(self) -> Core:
        """The core."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens that the model's configuration names."""
        ...

    @property
    def report_path(self) -> str | None:
        """Where the quantization report is, if one was written."""
        ...

    @property
    def cache_writer(self) -> BackgroundWork | None:
        """What still reads the model's weights, to keep them for the next time."""
        ...


@dataclass(frozen=True)
class ModelFacts:
    """What :class:`BuiltCore` says of the model, without the core: plain data that crosses processes."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    report_path: str | None = None

    @classmethod
    def of(cls, built: BuiltCore) -> "ModelFacts":
        """Take the facts from a built core."""
        return cls(built.max_model_len, built.vocab_size, frozenset(built.eos_token_ids), built.report_path)


CoreFactory = str | Callable[..., BuiltCore]
"""A function that builds a core, or its name as ``"module:function"`` (imported where it runs).

It is called with the :class:`EngineConfig` and, where it is rank 0 of several, with the
:class:`~requant.engine.team.Team` that it leads.
"""


class EngineDeadError(Exception):
    """The engine's process failed or is gone; nothing runs any more."""


BUILD_CORE: CoreFactory = "requant.engine.build:build_core"


def resolve(factory: CoreFactory) -> Callable[..., BuiltCore]:
    """The function that ``factory`` is or names."""
    if isinstance(factory, str):
        module, function = factory.split(":")
        return getattr(import_module(module), function)
    return factory
