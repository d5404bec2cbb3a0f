"""What the rest of requant asks of a model, whatever its family."""

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedConfig

from requant.kernels.attention_batch import AttentionBatch
from requant.layers.attention import CachedAttention
from requant.layers.base import PlainLayer, QuantizableLayer
from requant.parallel import ALONE, Ranks
from requant.recipe.layer import LayerNames


class CausalLM(nn.Module):
    """A decoder-only language model: a tree of layers whose paths are vLLM's module names.

    Constructing one creates no weights: loading builds, fills and finishes the layers that :meth:`quantizable` and
    :meth:`plain` name, and the owner of the KV cache binds ``kv_cache`` of :meth:`attention_layers`.

    Attributes:
        config: The transformers configuration it was made from.
        ranks: The one among all that this model has the share of.
        not_loaded: Layers of its checkpoints that a recipe could reach, and that are not run.
        copies: Names of checkpoint tensors that are not read, being copies of others.
        draft_layer: Name of its MTP layer, which drafts tokens (:meth:`draft`); None: it has none.
    """

    not_loaded: tuple[LayerNames, ...] = ()
    copies: tuple[str, ...] = ()
    draft_layer: str | None = None

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        self.ranks = ranks

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """One step.

        Args:
            input_ids: Integers [T], the tokens of all sequences behind each other.
            positions: Integers [T], each token's index in its sequence.
            batch: Which tokens belong to which sequence, and where the KV cache has them.

        Returns:
            Hidden states [T, H] behind the final norm, in the model's dtype.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H] of the tokens that matter → float32 logits [S, V]."""

    def draft(self, following: Tensor, hidden: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """What predicts the tokens after next, by the MTP layer; only of a model that has one.

        Args:
            following: Integers [T], for each token the one behind it.
            hidden: [T, H], what :meth:`forward` gave for the tokens; or what this method gave, to draft further.
            positions: Integers [T], of the tokens.
            batch: As for :meth:`forward`: the layer has a KV cache of its own, addressed in the same way.

        Returns:
            [T, H], for :meth:`draft_logits`.
        """
        raise NotImplementedError

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """What :meth:`draft` gave, [S, H] → float32 logits [S, V] of the token after next."""
        raise NotImplementedError

    def quantizable(self) -> Iterator[QuantizableLayer]:
        """The layers that a recipe can reach, in the model's order."""
        return (module for module in self.modules() if isinstance(module, QuantizableLayer))

    def plain(self) -> Iterator[PlainLayer]:
        """All other layers that must be built, in the model's order."""
        return (module for module in self.modules() if isinstance(module, PlainLayer))

    def attention_layers(self) -> list[CachedAttention]:
        """The layers that want a KV cache, in the model's order."""
        return [module for module in self.modules() if isinstance(module, CachedAttention)]
