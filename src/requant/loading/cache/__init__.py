"""A folder of quantized weights: what one load quantizes, the next one reads.

:func:`identify` tells what an entry would be for, :class:`Store` finds it or takes a new one, which a
:class:`Writer` fills while the model already runs. An entry is a folder of safetensors files with whole matrices,
so it serves any number of ranks.
"""

from requant.loading.cache.entry import Entry
from requant.loading.cache.identity import Identity, identify
from requant.loading.cache.store import USABLE, EntryState, Store
from requant.loading.cache.writer import Writer, make_writer, new_nonce

__all__ = ["USABLE", "Entry", "EntryState", "Identity", "Store", "Writer", "identify", "make_writer", "new_nonce"]
