"""The tokenizer as the front end uses it: encode, decode, render a chat, and know what ends a sequence."""

import json
import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from requant.engine.config import ModelConfig
from requant.errors import CheckpointError, ConfigError, RequestError, one_line

logger = logging.getLogger(__name__)

Message = dict[str, Any]


class Tokenizer:
    """A thin cover over a ``transformers`` tokenizer.

    Args:
        backend: The ``transformers`` tokenizer.
        chat_template: Jinja template to use instead of the tokenizer's.

    Attributes:
        eos_token_ids: The tokenizer's own end-of-sequence token, if it has one; a model may name others.

    Raises:
        ConfigError: ``chat_template`` is not Jinja.
    """

    def __init__(self, backend: Any, chat_template: str | None = None) -> None:
        self._backend = backend
        self._fast = _without_checks(backend)
        eos = backend.eos_token_id
        self.eos_token_ids = frozenset() if eos is None else frozenset({eos})
        self._template = chat_template
        self.token_text = lru_cache(maxsize=65536)(self._token_text)
        if chat_template is not None:
            self._check_template()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with what the model puts around one (BOS) unless told otherwise."""
        return self._backend(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that are not (yet) UTF-8 come out as U+FFFD."""
        if self._fast is not None:
            return self._fast.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return self._backend.decode(
            list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def plain_token_ids(self) -> list[int]:
        """All tokens that stand for text: those of the vocabulary without the special ones, ascending."""
        added = self._backend.added_tokens_decoder.items()
        special = {*self._backend.all_special_ids, *(token for token, how in added if how.special)}
        return sorted(set(self._backend.get_vocab().values()) - special)

    def _token_text(self, token: int) -> str:
        """Text of one token by itself, special tokens included."""
        return self.decode([token])

    def render_chat(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt that the chat template makes of ``messages``, special tokens written out.

        Args:
            messages: ``{"role": …, "content": text}``, oldest first.
            add_generation_prompt: End with the beginning of the assistant's answer.
            variables: Further variables of the template (``enable_thinking``), and
                ``continue_final_message``.

        Raises:
            RequestError: There is no template, or it refuses these messages.
        """
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt, **variables)
        except Exception as error:  # a template is a program: it can fail in any way
            if self._template is None and not self._backend.chat_template:
                message = "this model has no chat template; use completions, or give the server a --chat-template"
                raise RequestError(message) from error
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def _render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        return self._backend.apply_chat_template(
            list(messages), chat_template=self._template, tokenize=False, **variables
        )

    def _check_template(self) -> None:
        try:
            self._render([{"role": "user", "content": ""}])
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"--chat-template is not a Jinja template: line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # it is a template; what it wants of messages, a request will see
            logger.debug("the chat template refuses an empty message: %s", error)


def _without_checks(backend: Any) -> Any:
    """What a fast tokenizer decodes with in the end, in a third of the time; None: it does something of its own."""
    from transformers import PreTrainedTokenizerFast

    own = getattr(type(backend), "_decode", None) is not PreTrainedTokenizerFast._decode
    return None if own else backend.backend_tokenizer


def load_tokenizer(config: ModelConfig, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        config: ``tokenizer`` or else ``model`` says where it is: a folder, or a Hugging Face id at ``revision``.
        chat_template: A Jinja template or the path of a file with one; None: the tokenizer's own.

    Raises:
        CheckpointError: There is no tokenizer there that can be loaded.
        ConfigError: ``chat_template`` is neither a file nor a template.
    """
    from transformers import AutoTokenizer

    from requant.loading import locate_metadata

    template = _read_template(chat_template)
    source = config.tokenizer or config.model
    # Found as weights are, so that errors are the same, and at once where the Hub cannot be reached.
    folder = locate_metadata(source, config.revision)
    # That never brings Python files along: where they are allowed, transformers fetches them itself.
    place = source if config.trust_remote_code else folder
    try:
        backend = AutoTokenizer.from_pretrained(
            place, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # of any type: the files are read by several libraries, and may hold anything
        raise CheckpointError(f"no tokenizer can be loaded from {source}: {one_line(error)}") from error
    return Tokenizer(backend, template)


def _read_template(given: str | None) -> str | None:
    if given is None:
        return None
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--chat-template is {given!r}: {reason}; accepted: a file, or a Jinja template itself"
        ) from error


def eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """The tokens that end a sequence, as the model's files have them: each a number, a list, or absent.

    Args:
        folder: The checkpoint; ``generation_config.json`` in it counts, if there is one.
        config: Its configuration, with or without ``eos_token_id``.

    Raises:
        CheckpointError: ``generation_config.json`` cannot be read or is not a JSON object, or a token is no number.
    """
    named = [getattr(config, "eos_token_id", None)]
    file = folder / "generation_config.json"
    if os.path.isfile(file):
        try:
            named.append(json.loads(file.read_bytes()).get("eos_token_id"))
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{file} is not a JSON object") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    tokens = [token for value in named for token in (value if isinstance(value, list) else [value])]
    wrong = next((token for token in tokens if token is not None and type(token) is not int), None)
    if wrong is not None:
        raise CheckpointError(f"eos_token_id in {folder} names {wrong!r}; accepted: a token id or a list of them")
    return frozenset(token for token in tokens if token is not None)
