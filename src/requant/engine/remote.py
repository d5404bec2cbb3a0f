"""A core in processes of its own, with the methods of one in this process: what ``LLM`` uses for several ranks."""

from collections.abc import Iterable
from queue import SimpleQueue

from requant.engine.config import EngineConfig
from requant.engine.core_process import Abort, Add, Failed, FromCore, Ready, Refused
from requant.engine.interface import CoreFactory, EngineDeadError, ModelFacts
from requant.engine.messages import CoreRequest, StepResult
from requant.engine.process import EngineProcess
from requant.errors import RequantError, RequestError

_GUARD = "a script that makes an LLM of several ranks needs `if __name__ == '__main__':` around what it runs"


class RemoteCore:
    """A :class:`~requant.engine.interface.Core` whose steps are made elsewhere, one after the other.

    Args:
        config: What to build.
        factory: Builds it, over there.

    Attributes:
        facts: What it says of its model.

    Raises:
        RequantError: It cannot be built, for a reason written for the user.
        EngineDeadError: It failed otherwise.
    """

    def __init__(self, config: EngineConfig, factory: CoreFactory) -> None:
        self._inbox: SimpleQueue[FromCore] = SimpleQueue()
        self._process = EngineProcess(config, factory, "warning")
        self._unfinished: set[str] = set()
        try:
            self._process.start(self._inbox.put)
            first = self._inbox.get()
        except BaseException:
            self._process.stop()
            raise
        if not isinstance(first, Ready):
            self._process.stop()
            assert isinstance(first, Failed)
            if first.for_user:
                raise RequantError(first.message)
            raise EngineDeadError(f"{first.message} ({_GUARD})" if "exit code" in first.message else first.message)
        self.facts: ModelFacts = first.facts

    def add_request(self, source: CoreRequest) -> None:
        """Queue a request; should it be refused, the next :meth:`step` says so."""
        self._unfinished.add(source.request_id)
        self._process.send(Add((source,)))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; the next steps report their ends."""
        wanted = tuple(request_id for request_id in request_ids if request_id in self._unfinished)
        if wanted:
            self._process.send(Abort(wanted))

    def has_unfinished(self) -> bool:
        """Whether another step has anything to say."""
        return bool(self._unfinished)

    def step(self) -> StepResult:
        """The next step that was made.

        Raises:
            RequestError: A request was refused.
            EngineDeadError: The engine failed.
        """
        message = self._inbox.get()
        if isinstance(message, Refused):
            self._unfinished.discard(message.request_id)
            raise RequestError(message.message)
        if isinstance(message, Failed):
            self._unfinished.clear()
            self._inbox.put(message)  # for whoever asks again
            raise EngineDeadError(message.message)
        assert isinstance(message, StepResult)
        for output in message.outputs:
            if output.finish_reason is not None:
                self._unfinished.discard(output.request_id)
        return message

    def close(self) -> None:
        """End the processes; returns when they are gone."""
        self._process.stop()
