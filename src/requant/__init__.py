"""requant: quantize an LLM's weights while loading them, and serve the result.

The public names are imported lazily, so that ``import requant`` stays cheap:

* :func:`quantize` and :class:`QuantizedTensor`: one matrix, in the numeric contract of the formats.
* :class:`LLM` and :class:`SamplingParams`: the offline engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from requant.engine.llm import LLM
    from requant.engine.sampling_params import SamplingParams
    from requant.formats import QuantizedTensor, quantize

__version__ = "0.1.0"
__all__ = ["LLM", "QuantizedTensor", "SamplingParams", "__version__", "quantize"]

_HOME = {
    "LLM": "requant.engine.llm",
    "SamplingParams": "requant.engine.sampling_params",
    "QuantizedTensor": "requant.formats",
    "quantize": "requant.formats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'requant' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
