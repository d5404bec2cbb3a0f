"""What attention needs to know of a batch: which tokens belong to which sequence, and where its KV lies.

Legend: T tokens of this step over all sequences, B sequences, P pages of ``block_size`` slots each.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """One step's sequences, flattened: the queries of a sequence are its *last* tokens.

    Attributes:
        query_start: int32 [B + 1]: tokens of sequence b are ``query_start[b]:query_start[b + 1]`` of T.
        context_lens: int32 [B]: length of each sequence including this step's tokens.
        block_tables: int32 [B, max pages]: page numbers of each sequence, in order; entries past its length
            are 0 and never read.
        slots: int64 [T]: where each token's key and value go (page · block_size + offset); -1: nowhere
            (padding of a CUDA graph).
        max_query: Largest number of tokens of one sequence (1: a pure decode batch).
        max_context: Largest of ``context_lens``.
    """

    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slots: Tensor
    max_query: int
    max_context: int
