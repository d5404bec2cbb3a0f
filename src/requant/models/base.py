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
    """

    not_loaded: tuple[LayerNames, ...] = ()

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

    def quantizable(self) -> Iterator[QuantizableLayer]:
        """The layers that a recipe can reach, in the model's order."""
        return (module for module in self.modules() if isinstance(module, QuantizableLayer))

    def plain(self) -> Iterator[PlainLayer]:
        """All other layers that must be built, in the model's order."""
        return (module for module in self.modules() if isinstance(module, PlainLayer))

    def attention_layers(self) -> list[CachedAttention]:
        """The layers that want a KV cache, in the model's order."""
        return [module for module in self.modules() if isinstance(module, CachedAttention)]
