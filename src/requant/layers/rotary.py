"""Rotary position embedding (https://arxiv.org/abs/2104.09864), of the two halves of a head or of neighbours.

How a variant spreads its frequencies is transformers' own business: they are taken from its
``ROPE_INIT_FUNCTIONS``, computed once, on the CPU, and are then the same on every device.

Two variants (``dynamic``, ``longrope``) let the frequencies depend on the length of what is being processed. Here
they are fixed: those of a context of ``max_position_embeddings`` tokens. So a key that lies in the cache never needs
another rotation, and a sequence does not depend on what it is batched with. For ``dynamic`` that is what transformers
computes for every context up to ``max_position_embeddings``; for ``longrope``, for contexts longer than
``original_max_position_embeddings``.
"""

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from requant.errors import ModelError
from requant.layers.base import PlainLayer

_SCALED_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")


class RotaryEmbedding(PlainLayer):
    """Cosines and sines of positions.

    Args:
        config: A transformers configuration; its ``rope_parameters`` are read (older files' ``rope_theta`` and
            ``rope_scaling`` are turned into them by transformers).
        head_dim: Size of a head; ``partial_rotary_factor`` of it is rotated.

    Raises:
        ModelError: The rope type is not one of those that requant runs, or a parameter of it is missing or wrong.
    """

    inv_freq: Tensor

    def __init__(self, config: object, head_dim: int) -> None:
        super().__init__()
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = [key for key, value in parameters.items() if isinstance(value, dict)]
        if nested:
            raise ModelError(f"rope_parameters are given for each of {', '.join(nested)}; accepted: one for all layers")
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in ("default", *_SCALED_TYPES):
            raise ModelError(f"rope type {rope_type!r} is not supported; accepted: default, {', '.join(_SCALED_TYPES)}")
        try:
            # Never the meta device, whatever the context in which the model is constructed.
            with torch.device("cpu"):
                self._cpu_inv_freq, self.scaling = _frequencies(config, parameters, rope_type, head_dim)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise ModelError(f"rope_parameters {parameters} do not suit rope type {rope_type!r} ({detail})") from error
        if not self._cpu_inv_freq.isfinite().all():
            raise ModelError(f"rope_parameters {parameters} give no finite frequencies")

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put the frequencies, always float32, on ``device``."""
        self.register_buffer("inv_freq", self._cpu_inv_freq.to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [T] → (cos, sin), each [T, 1, R/2] for R rotated features, computed in float32."""
        angles = positions[:, None, None].float() * self.inv_freq
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def _frequencies(config: object, parameters: dict, rope_type: str, head_dim: int) -> tuple[Tensor, float]:
    """Float32 [R/2] inverse frequencies, and the factor on cosines and sines."""
    if rope_type == "default":
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        return 1.0 / parameters["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated), 1.0
    longest = config.max_position_embeddings  # type: ignore[attr-defined]
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=longest)
    return inv_freq.float(), float(scaling)
