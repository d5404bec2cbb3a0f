"""Sampling as tensor arithmetic: penalties, filters, noise, log-probabilities. No request, no host transfer.

Legend: R rows (one next token each), V vocabulary, N listed entries, K top entries.
"""

import torch
from torch import Tensor

SHORT_TOP_K = 1024
"""Up to here ``torch.topk`` is used instead of sorting the vocabulary."""

# Shifts and constants of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
# as wrapped 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
_UNIT_BITS = 53


def token_counts(rows_N: Tensor, tokens_N: Tensor, num_rows: int, vocab: int) -> Tensor:
    """How often each token occurs in each row's history.

    Args:
        rows_N: int64, the row of each entry.
        tokens_N: int64, the token of each entry, below ``vocab``.
        num_rows: R.
        vocab: V.

    Returns:
        float32 [R, V].
    """
    flat = torch.zeros(num_rows * vocab, dtype=torch.float32, device=tokens_N.device)
    flat.scatter_add_(0, rows_N * vocab + tokens_N, torch.ones_like(tokens_N, dtype=torch.float32))
    return flat.view(num_rows, vocab)


def penalize(
    logits_RV: Tensor,
    output_counts_RV: Tensor,
    prompt_counts_RV: Tensor,
    repetition_R1: Tensor,
    frequency_R1: Tensor,
    presence_R1: Tensor,
) -> Tensor:
    """Apply the three penalties: repetition on prompt and output tokens, then frequency and presence on output tokens.

    The repetition penalty is that of Keskar et al., "CTRL" (2019), made symmetric for negative logits as is usual;
    the others are OpenAI's: logit - frequency · count - presence · (count > 0).

    Returns:
        float32 [R, V], a new tensor, finite also where a penalty is so strong that a product overflows.
    """
    largest = torch.finfo(torch.float32).max
    seen = (output_counts_RV > 0) | (prompt_counts_RV > 0)
    repeated = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    repeated = repeated.clamp_(-largest, largest)
    result = torch.where(seen, repeated, logits_RV)
    return result - frequency_R1 * output_counts_RV - presence_R1 * (output_counts_RV > 0)


def filter_threshold(logits_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, min_p_R1: Tensor, widest: int) -> Tensor:
    """Smallest logit of each row that may be sampled; tokens as likely as that one may be, too.

    ``min_p`` is applied first, then ``top_k``, then ``top_p`` on what is left, renormalized. Being a threshold, the
    result does not depend on how a sort orders equal logits; they are common when logits come from bfloat16.

    Args:
        logits_RV: float32, after penalties and temperature.
        top_k_R1: int64, 1 … V; V keeps all.
        top_p_R1: float32 in (0, 1]; 1 keeps all.
        min_p_R1: float32 in [0, 1]; 0 keeps all.
        widest: Largest of ``top_k_R1``, known on the host.

    Returns:
        float32 [R, 1].
    """
    vocab = logits_RV.shape[1]
    if widest <= SHORT_TOP_K and widest < vocab:
        sorted_RK = logits_RV.topk(widest, dim=1).values
    else:
        sorted_RK = logits_RV.sort(dim=1, descending=True).values
    ranks = torch.arange(sorted_RK.shape[1], device=logits_RV.device)
    keep = (ranks < top_k_R1) & (sorted_RK >= sorted_RK[:, :1] + min_p_R1.log())
    probs = sorted_RK.masked_fill(~keep, -torch.inf).softmax(dim=1)
    before = probs.cumsum(dim=1) - probs
    # A rounded sum can reach 1 before the last token: a row that asked for everything is not cut.
    keep &= (before < top_p_R1) | (top_p_R1 >= 1)
    keep[:, 0] = True
    return sorted_RK.masked_fill(~keep, torch.inf).amin(dim=1, keepdim=True)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place on int64 (arithmetic wraps; shifts are made logical by a mask)."""
    for shift, factor in _MIX:
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= factor
    x ^= (x >> _LAST_SHIFT) & ((1 << (64 - _LAST_SHIFT)) - 1)
    return x


def seeded_exponential(seeds_R: Tensor, positions_R: Tensor, vocab: int) -> Tensor:
    """Exponential(1) noise that depends on a row's seed and position alone.

    It is a function, not a generator with a state: a sequence draws the same noise on every device, whatever shares
    its batch, and after being preempted.

    Args:
        seeds_R: int64.
        positions_R: int64, which token of its sequence a row samples.
        vocab: V.

    Returns:
        float32 [R, V], above 0 and finite.
    """
    keys = _mix(_mix(seeds_R.clone()) + positions_R * _GAMMA)
    steps = torch.arange(1, vocab + 1, device=seeds_R.device) * _GAMMA
    bits = _mix(keys.unsqueeze(1) + steps)
    bits = (bits >> (64 - _UNIT_BITS)) & ((1 << _UNIT_BITS) - 1)
    # The argmax is decided by small values: they come from small uniforms, which float32 holds finely.
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-_UNIT_BITS
    return -torch.log1p(-uniform.clamp_(max=1 - 2.0**-24))


def gumbel_argmax(logits_RV: Tensor, noise_RV: Tensor) -> Tensor:
    """Sample from softmax(logits): the argmax of logits plus Gumbel noise, -log of exponential noise.

    Args:
        logits_RV: float32; -inf is never sampled as long as a row has another value.
        noise_RV: float32 Exponential(1) samples; changed.

    Returns:
        int64 [R].
    """
    tiny = torch.finfo(torch.float32).tiny  # a sample of exactly 0 would make -inf + inf
    return (logits_RV - noise_RV.clamp_(min=tiny).log_()).argmax(dim=1)


def rank_and_logprob(logits_RV: Tensor, tokens_R: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank of one token a row, and the row's most likely tokens.

    Returns:
        (logprob float32 [R], rank int64 [R], top logprobs float32 [R, top], top tokens int64 [R, top]).
        The rank is 1 + the number of tokens with a strictly larger logit.
    """
    chosen = logits_RV.gather(1, tokens_R.unsqueeze(1))
    total = logits_RV.logsumexp(dim=1, keepdim=True)
    rank = (logits_RV > chosen).sum(dim=1) + 1
    best = logits_RV.topk(top, dim=1)
    return (chosen - total).squeeze(1), rank, best.values - total, best.indices
