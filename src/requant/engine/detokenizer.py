"""From a sequence's tokens, one at a time, to text that can be shown: whole characters, and no stop string."""

from collections.abc import Sequence

from requant.engine.sampling_params import SamplingParams
from requant.engine.tokenizer import Tokenizer

# Tokens of the prompt that are decoded along with the first new ones: whether a token begins with a space can
# depend on what stands before it.
_CONTEXT = 5
_BROKEN = "\ufffd"


class Detokenizer:
    """Incremental decoding of one sequence.

    A token's text can depend on the tokens before it and, where a character is spread over several tokens, on the
    ones after it. So a window of tokens is decoded with and without the new ones, and the difference is text,
    once it does not end in the middle of a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = list(prompt[-_CONTEXT:])
        self._context = len(self._window)
        self._context_text = self._decode()

    def add(self, token: int) -> str:
        """The text that became certain with ``token``: whole characters only, maybe none."""
        self._window.append(token)
        text = self._decode()
        if text.endswith(_BROKEN) or len(text) <= len(self._context_text):
            return ""
        new = text[len(self._context_text) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._context_text = self._decode()
        return new

    def flush(self) -> str:
        """What is left at the end of the sequence: U+FFFD for a character that was never completed."""
        return self._decode()[len(self._context_text) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip) if self._window else ""


class OutputText:
    """The text of one sequence, watched for stop strings, which may begin in one token and end in another.

    Attributes:
        text: All text so far. After a stop string was found it ends before it, or behind it with
            ``include_stop_str_in_output``.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, params.skip_special_tokens)
        self._stop = params.stop
        self._include = params.include_stop_str_in_output
        self._shown = 0
        self.text = ""

    def add(self, token: int, may_stop: bool = True) -> str | None:
        """Append a token; the stop string that its text completed, if any.

        Args:
            token: The token.
            may_stop: False: don't look for stop strings that end in this token (``min_tokens``).
        """
        return self._append(self._detokenizer.add(token), may_stop)

    def finish(self) -> str | None:
        """Append what the last token left open; the stop string that it completed, if any."""
        return self._append(self._detokenizer.flush(), True)

    def take(self, finished: bool) -> str:
        """The text that was not taken yet, less what may turn out to be a stop string's beginning."""
        end = len(self.text) if finished or self._include else len(self.text) - self._held()
        new = self.text[self._shown : end]
        self._shown = max(end, self._shown)
        return new

    def _append(self, new: str, may_stop: bool) -> str | None:
        before = len(self.text)
        self.text += new
        if not (new and self._stop and may_stop):
            return None
        found = [(self.text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in self._stop]
        start, stop = min(((at, stop) for at, stop in found if at >= 0), key=lambda hit: hit[0], default=(0, ""))
        if not stop:
            return None
        self.text = self.text[: start + len(stop) if self._include else start]
        return stop

    def _held(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        return max((self._overlap(stop) for stop in self._stop), default=0)

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self.text))
        return next((size for size in range(longest, 0, -1) if self.text.endswith(stop[:size])), 0)
