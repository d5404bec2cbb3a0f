"""``LLM``: the engine for scripts and notebooks, in this process, or with several ranks in one for each."""

import atexit
import gc
import itertools
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from requant.engine.config import EngineConfig
from requant.engine.interface import BUILD_CORE, BackgroundWork, Core, CoreFactory, ModelFacts, resolve
from requant.engine.output import OutputProcessor
from requant.engine.prompts import InputProcessor, Prompt
from requant.engine.remote import RemoteCore
from requant.engine.request_output import RequestOutput
from requant.engine.sampling_params import SamplingParams
from requant.engine.tokenizer import Message, load_tokenizer
from requant.errors import RequestError

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class LLM:
    """A model, quantized while it was loaded, ready to generate.

    ::

        with LLM("Qwen/Qwen3-0.6B", online_quant_config={"global_quant_config": "ptpc_fp8"}) as llm:
            outputs = llm.generate("The capital of France is", SamplingParams(temperature=0))
            print(outputs[0].outputs[0].text)

    Args:
        model: A local folder or a Hugging Face id.
        online_quant_config: The recipe: a dict, JSON text, or the path of a JSON file; None: as it is on disk.
        chat_template: A Jinja template, or the path of a file with one, to use instead of the model's.
        core_factory: Builds the engine core.
        options: The names of :class:`~requant.engine.config.EngineConfig` (``dtype``, ``max_model_len``, …). With
            ``tensor_parallel_size`` above 1 the engine's processes import the script anew: it needs
            ``if __name__ == "__main__":`` around what it runs.

    Raises:
        RequantError: The options, the recipe or the checkpoint are not acceptable.
        EngineDeadError: One of several ranks failed, here or later.
    """

    def __init__(
        self,
        model: str,
        online_quant_config: Any = None,
        *,
        chat_template: str | None = None,
        core_factory: CoreFactory = BUILD_CORE,
        **options: Any,
    ) -> None:
        config = EngineConfig.create(model=model, online_quant_config=online_quant_config, **options)
        self._tokenizer = load_tokenizer(config.model, chat_template)
        self._core: Core
        if config.parallel.tensor_parallel_size > 1:
            remote = RemoteCore(config, core_factory)
            self.facts, self._core, self._close = remote.facts, remote, remote.close
        else:
            built = resolve(core_factory)(config)
            self.facts, self._core, self._close = ModelFacts.of(built), built.core, _free_memory
            if built.cache_writer:
                self._close = partial(_finish_and_free, built.cache_writer)
                atexit.register(built.cache_writer.wait)  # else a short script would leave nothing for the next one
        self._inputs = InputProcessor(self._tokenizer, self.facts)
        self._outputs = OutputProcessor(self._tokenizer, self.facts.eos_token_ids | self._tokenizer.eos_token_ids)
        self._ids = itertools.count()
        self._open = True

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate from one prompt or many; they run together.

        Args:
            prompts: A text, token ids, or a list of either.
            sampling_params: For all prompts, or one for each; None: the defaults.
            progress: Show a progress bar, if stderr is a terminal.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: A prompt or a parameter is not acceptable; nothing has run then.
        """
        every = _as_list(prompts)
        return self._run(every, sampling_params, progress, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Args:
            messages: ``{"role": …, "content": text}``, oldest first; or a list of such conversations.
            sampling_params: As in :meth:`generate`.
            progress: As in :meth:`generate`.
            add_generation_prompt: End the prompt with the beginning of the assistant's answer.
            variables: Further variables of the template (``enable_thinking=False``).

        Returns:
            One output for each conversation, in their order.

        Raises:
            RequestError: As :meth:`generate`; or there is no template, or it refuses the messages.
        """
        chats: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        rendered = [
            self._tokenizer.render_chat(chat, add_generation_prompt=add_generation_prompt, **variables)
            for chat in chats
        ]
        return self._run(rendered, sampling_params, progress, add_special_tokens=False)

    def shutdown(self) -> None:
        """Let go of the model and its memory; the object is of no use afterwards."""
        if not self._open:
            return
        self._open = False
        del self._core
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        if not self._open:
            raise RequestError("this LLM was shut down; make a new one")
        each = _params_of_each(params, len(prompts))
        prepared = [
            self._inputs.prepare(prompt, own, add_special_tokens) for prompt, own in zip(prompts, each, strict=True)
        ]
        try:
            return self._generate(prepared, progress)
        except BaseException:
            # Interrupted, or failed: what is queued must not come back in the next call.
            for request_id in self._outputs.open_requests():
                self._core.abort(self._outputs.abort(request_id))
            raise

    def _generate(self, prompts: Sequence[Prompt], progress: bool) -> list[RequestOutput]:
        ids = [f"req-{next(self._ids)}" for _ in prompts]
        for request_id, prompt in zip(ids, prompts, strict=True):
            for request in self._outputs.add(request_id, prompt, delta=False):
                self._core.add_request(request)
        done: dict[str, RequestOutput] = {}
        with _progress_bar(progress) as bar:
            task = bar.add_task("generating", total=len(prompts))
            while self._core.has_unfinished():
                reports, abort = self._outputs.process(self._core.step().outputs)
                self._core.abort(abort)
                done.update({report.request_id: report for report in reports})
                bar.update(task, completed=len(done))
        return [done[request_id] for request_id in ids]


def _finish_and_free(writer: BackgroundWork) -> None:
    writer.wait()  # it reads the weights
    atexit.unregister(writer.wait)
    _free_memory()


def _free_memory() -> None:
    gc.collect()  # Modules and graphs refer to each other.
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _as_list(prompts: Prompts) -> list[Any]:
    """One prompt as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _params_of_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise RequestError(f"{len(given)} sampling parameters for {count} prompts; accepted: one, or one for each")
    return list(given)


def _progress_bar(wanted: bool) -> Progress:
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not (wanted and console.is_terminal))
