"""The batch that attention works on, under the name that the engine builds it by."""

from requant.kernels.attention_batch import AttentionBatch

__all__ = ["AttentionBatch"]
