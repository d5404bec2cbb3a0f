"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, §2.2): a decoder layer that drafts tokens.

Legend: T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from requant.kernels.attention_batch import AttentionBatch
from requant.layers.base import QuantizableLayer
from requant.layers.embedding import OutputHead
from requant.layers.linear import Linear, Part
from requant.layers.norm import RMSNorm
from requant.models.decoder import DecoderLayer
from requant.parallel import ALONE, Ranks
from requant.recipe.layer import LayerNames

PROTECTED = ("MTP eh_proj", "MTP shared_head.head")
"""Kinds of the two layers that no recipe reaches by its global target."""


class SharedHead(nn.Module):
    """The norm before the head, and the head.

    Args:
        name: The module's name (``model.layers.61.shared_head``).
        config: The transformers configuration.
        head: The model's head, which this one is, unless a recipe quantizes it on its own.
        ranks: The ranks.
    """

    def __init__(self, name: str, config: PreTrainedConfig, head: OutputHead, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.norm = RMSNorm(f"{name}.norm", config.hidden_size, config.rms_norm_eps)
        self.head = OutputHead(
            f"{name}.head", config.vocab_size, config.hidden_size, ranks=ranks, kind=PROTECTED[1], same_as=head
        )


class MtpLayer(DecoderLayer):
    """Joins a token with the hidden state before it, and runs a decoder layer on that.

    For token i it takes the model's hidden state behind the final norm and the embedding of token i + 1, and predicts
    token i + 2. Its keys and values lie at the position of token i.

    Args:
        name: The module's name: that of the layer behind the model's last one (``model.layers.61``).
        config: The transformers configuration.
        layer: What a layer of the model at this place would be; its attention and its MLP are used.
        head: The model's head.
        ranks: The ranks.
    """

    def __init__(
        self, name: str, config: PreTrainedConfig, layer: DecoderLayer, head: OutputHead, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(name, config, layer.self_attn, layer.mlp)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(f"{name}.enorm", hidden, eps)
        self.hnorm = RMSNorm(f"{name}.hnorm", hidden, eps)
        projection = f"{name}.eh_proj"
        self.eh_proj = Linear(projection, 2 * hidden, [Part(projection, hidden)], protected=PROTECTED[0])
        self.shared_head = SharedHead(f"{name}.shared_head", config, head, ranks)

    def draft(self, embedding: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        """The hidden states that predict the tokens after next.

        Args:
            embedding: [T, H], of the tokens behind those of ``hidden``.
            hidden: [T, H], behind the model's final norm; or what this method gave, to draft further.
            rope: (cos, sin) of the positions of ``hidden``'s tokens.
            batch: Where their keys and values go.

        Returns:
            [T, H], behind the norm of the head.
        """
        joined = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        out, residual = super().forward(joined, None, rope, batch)
        return self.shared_head.norm(out, residual)[0]


def names_not_loaded(name: str, layer: DecoderLayer, reason: str) -> Iterator[LayerNames]:
    """What a recipe sees of an MTP layer that is not run: its projection, the decoder layer's own and its head.

    Args:
        name: The layer's name.
        layer: As for :class:`MtpLayer`.
        reason: Why it is not run.
    """
    projection, head = f"{name}.eh_proj", f"{name}.shared_head.head"
    yield LayerNames(projection, (projection,), protected=PROTECTED[0], not_loaded=reason)
    for module in layer.modules():
        if isinstance(module, QuantizableLayer):
            names = module.names
            yield LayerNames(names.module, names.parts, names.protected, names.fixed, reason)
    yield LayerNames(head, (head,), protected=PROTECTED[1], not_loaded=reason)
