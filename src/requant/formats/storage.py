"""What a layer is stored as: where the recipe's decision meets what the checkpoint has.

The one place that knows "excluded" and "already there", for every kind of layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from requant.errors import CheckpointError
from requant.formats import FORMATS, Format
from requant.recipe import Decision


@dataclass(frozen=True)
class Storage:
    """How a layer is kept on the device.

    Attributes:
        format: The format of its weights; None: unquantized.
        quantized: Whether at least one part is quantized on the way; else the layer is kept as the checkpoint has it.
        reason: Why it is kept; "" if it is not.
        note: What else the user should be told, else "".
    """

    format: Format | None
    quantized: bool
    reason: str = ""
    note: str = ""


def store(decision: Decision, sources: Sequence[Format | None]) -> Storage:
    """Decide one layer.

    Args:
        decision: What the recipe says.
        sources: The format of each part in the checkpoint; None: unquantized.

    Returns:
        Parts whose source is the storage's format are kept bit for bit. Others are quantized, which may mean to be
        dequantized first; parts of one layer that is kept, but not in one format, are dequantized.

    Raises:
        CheckpointError: The parts of one layer are in formats that cannot be joined.
    """
    target = FORMATS[decision.format] if decision.format else None
    fixed = next((source for source in sources if source and not source.requantizes), None)
    if fixed is not None:
        return _pass_through(decision, fixed, sources)
    if target is None:
        kinds = set(sources)
        if len(kinds) == 1:
            return Storage(kinds.pop(), False, decision.reason)
        return Storage(None, False, decision.reason, "its parts are partly quantized in the checkpoint; dequantized")
    if all(source == target for source in sources):
        return Storage(target, False, f"{target.name} in the checkpoint already, which is its target")
    return Storage(target, True)


def _pass_through(decision: Decision, fixed: Format, sources: Sequence[Format | None]) -> Storage:
    if any(source != fixed for source in sources):
        given = ", ".join(sorted({source.name if source else "unquantized" for source in sources}))
        raise CheckpointError(
            f"the parts of {decision.layer} are {given} in the checkpoint; accepted: all of them {fixed.name}, or none"
        )
    state = f"{fixed.name} in the checkpoint"
    if decision.format == fixed.name:
        return Storage(fixed, False, f"{state} already, which is its target", f"{state}, passed through unchanged")
    wanted = f", not quantized to {decision.format}" if decision.format else ""
    reason = "; ".join(filter(None, (decision.reason, f"{state}, passed through unchanged{wanted}")))
    return Storage(fixed, False, reason, f"{state}, passed through unchanged")
