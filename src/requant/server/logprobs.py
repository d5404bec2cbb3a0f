"""Log-probabilities in the shapes of the different endpoints."""

from collections.abc import Sequence
from typing import Any

from requant.engine.request_output import TokenLogprob
from requant.server.chat_protocol import ChatLogprobs, ChatTokenLogprob, TopLogprob
from requant.server.completion_protocol import CompletionLogprobs


def append_completion_logprobs(
    into: CompletionLogprobs, entries: Sequence[TokenLogprob], count: int, shift: int
) -> None:
    """Append tokens to the parallel lists.

    Args:
        into: Where to.
        entries: The tokens.
        count: How many of the most likely ones to name; the token itself is named in any case.
        shift: Added to each offset: length of the text before these tokens' text.
    """
    for entry in entries:
        top = {entry.text: entry.logprob}
        for candidate in entry.top[:count]:
            # Two tokens may have one text, as the parts of a character do: the likelier one stands.
            top[candidate.text] = max(candidate.logprob, top.get(candidate.text, candidate.logprob))
        into.tokens.append(entry.text)
        into.token_logprobs.append(entry.logprob)
        into.top_logprobs.append(top)
        into.text_offset.append(entry.offset + shift)


def chat_logprobs(entries: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """The tokens of an answer, or of a piece of one."""
    if not entries:
        return None
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=entry.text,
                logprob=entry.logprob,
                bytes=list(entry.text.encode()),
                top_logprobs=[
                    TopLogprob(token=top.text, logprob=top.logprob, bytes=list(top.text.encode())) for top in entry.top
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(entries: Sequence[TokenLogprob | None]) -> list[dict[int, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt, token id → log-probability, rank and text."""
    return [None if entry is None else _ranked(entry) for entry in entries]


def _ranked(entry: TokenLogprob) -> dict[int, dict[str, Any]]:
    ranked = {
        top.token: {"logprob": top.logprob, "rank": rank, "decoded_token": top.text}
        for rank, top in enumerate(entry.top, start=1)
    }
    ranked.setdefault(entry.token, {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text})
    return ranked
