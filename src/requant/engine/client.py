"""The engine for an asyncio program: requests go to the core's process, outputs come back as they are made."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from requant.engine.config import EngineConfig
from requant.engine.core_process import Abort, Add, Failed, FromCore, Ready, Refused
from requant.engine.interface import BUILD_CORE, CoreFactory, EngineDeadError, ModelFacts
from requant.engine.messages import CoreRequest, CoreStats, StepResult
from requant.engine.output import OutputProcessor
from requant.engine.process import EngineProcess
from requant.engine.prompts import InputProcessor, Prompt
from requant.engine.request_output import FinishedRequest, RequestOutput
from requant.engine.sampling_params import SamplingParams
from requant.engine.tokenizer import Message, Tokenizer
from requant.errors import RequantError, RequestError

logger = logging.getLogger(__name__)


class AsyncEngine:
    """A front end of an engine core in a process of its own. Used from one event loop.

    Args:
        config: What to build.
        load_tokenizer: Loads the tokenizer; called on a thread while the core is being built.
        core_factory: Builds the core, in its process.
        log_level: Of the core's process.
        on_finished: Told of every request that ended.
        on_death: Called once if the core fails after it was ready.

    Attributes:
        stats: The core's latest.
        dead: Why nothing runs any more, or None.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_tokenizer: Callable[[], Tokenizer],
        core_factory: CoreFactory = BUILD_CORE,
        log_level: str = "info",
        on_finished: Callable[[FinishedRequest], None] = lambda request: None,
        on_death: Callable[[EngineDeadError], None] = lambda error: None,
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._process = EngineProcess(config, core_factory, log_level)
        self._on_finished = on_finished
        self._on_death = on_death
        # One thread, so that texts are tokenized beside the event loop but never two at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._ids = itertools.count()
        self._queues: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self.stats = CoreStats()
        self.dead: EngineDeadError | None = None

    async def start(self) -> ModelFacts:
        """Start the core's process, load the tokenizer meanwhile, and wait until requests are taken.

        Raises:
            RequantError: The core or the tokenizer cannot be built, for a reason written for the user.
            EngineDeadError: The core failed otherwise.
        """
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelFacts] = loop.create_future()

        def on_message(message: FromCore) -> None:
            loop.call_soon_threadsafe(self._receive, message)

        self._process.start(on_message)
        try:
            loading = loop.run_in_executor(self._thread, self._load_tokenizer)
            self._tokenizer, self.facts = await asyncio.gather(loading, self._ready)
        except BaseException:
            self.stop()
            raise
        self._inputs = InputProcessor(self._tokenizer, self.facts)
        eos = self.facts.eos_token_ids | self._tokenizer.eos_token_ids
        self._outputs = OutputProcessor(self._tokenizer, eos, self._on_finished)
        return self.facts

    def stop(self) -> None:
        """End the core's process; open requests get an error. A second call does nothing."""
        self._fail(EngineDeadError("the engine was shut down"))
        self._process.stop()
        self._thread.shutdown(wait=False)

    async def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        add_special_tokens: bool = True,
        must_fit: bool = True,
    ) -> Prompt:
        """Tokenize and check a prompt; see :meth:`InputProcessor.prepare`."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._inputs.prepare, prompt, params, add_special_tokens, must_fit
        )

    async def render_chat(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """The prompt of a chat; see :meth:`Tokenizer.render_chat`."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._tokenizer.render_chat(messages, **variables)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens written out."""
        return self._tokenizer.decode(tokens)

    async def generate(self, prompts: Sequence[Prompt], delta: bool) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Run prompts together, and give what comes of them as it comes: (index of the prompt, output).

        What is still running when the iteration ends early (an error, a cancelled task, ``aclose()``) is aborted.

        Args:
            prompts: From :meth:`prepare`.
            delta: Give every piece of news; False: each prompt once, when it is finished.

        Raises:
            EngineDeadError: The core failed.
            RequestError: The core refused a request.
        """
        if self.dead is not None:
            raise self.dead
        queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        indices = {f"req-{next(self._ids)}": index for index in range(len(prompts))}
        unfinished = set(indices)
        try:
            requests: list[CoreRequest] = []
            for request_id, index in indices.items():
                self._queues[request_id] = queue
                requests += self._outputs.add(request_id, prompts[index], delta)
            self._process.send(Add(tuple(requests)))
            while unfinished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                if output.finished:
                    unfinished.remove(output.request_id)
                yield indices[output.request_id], output
        finally:
            self._abort(unfinished)
            for request_id in indices:
                self._queues.pop(request_id, None)

    def _abort(self, request_ids: set[str]) -> None:
        aborted = [core_id for request_id in request_ids for core_id in self._outputs.abort(request_id)]
        if aborted and self.dead is None:
            self._process.send(Abort(tuple(aborted)))

    def _receive(self, message: FromCore) -> None:
        """Take a message of the core's process, on the event loop."""
        if isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message.facts)
        elif isinstance(message, StepResult):
            self.stats = message.stats
            reports, abort = self._outputs.process(message.outputs)
            if abort:
                self._process.send(Abort(tuple(abort)))
            for report in reports:
                self._queues[report.request_id].put_nowait(report)
        elif isinstance(message, Refused):
            request_id = self._outputs.request_of(message.request_id)
            if request_id is not None:
                self._queues[request_id].put_nowait(RequestError(message.message))
        else:
            self._failed(message)

    def _failed(self, message: Failed) -> None:
        error: Exception = RequantError(message.message)
        if not message.for_user:
            error = EngineDeadError(message.message)
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self.dead is None:
            logger.error("the engine failed: %s", message.message)
            dead = EngineDeadError(message.message)
            self._fail(dead)
            self._on_death(dead)

    def _fail(self, error: EngineDeadError) -> None:
        if self.dead is None:
            self.dead = error
        for queue in set(self._queues.values()):
            queue.put_nowait(error)
