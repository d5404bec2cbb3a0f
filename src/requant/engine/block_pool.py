"""The KV cache as fixed-size blocks: who holds which, and which can be served again to an equal prefix.

A block with a key is full of tokens, and its KV depends on nothing but those tokens and all before them; the key
says exactly that (:func:`chain_key`). When its last holder lets go of it, it stays findable until its turn comes to
be handed out again, least recently used first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

ROOT_KEY = b""
"""Parent of a sequence's first block."""


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block: a digest of its tokens and, through ``parent``, of every token before them.

    SHA-256, so that equal keys mean equal prefixes even for prompts made to collide.

    Args:
        parent: Key of the block before, :data:`ROOT_KEY` for the first one.
        tokens: The token ids of the block, all of them.
    """
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    """Reference counts, free list and prefix index of ``num_blocks`` KV blocks.

    Args:
        num_blocks: Blocks 0 … num_blocks - 1, all of them free at first.
        caching: Whether blocks can be found again by key; without it :meth:`publish` does nothing.
    """

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to hand out first

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, findable ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def holders(self, block: int) -> int:
        """How many sequences hold ``block``."""
        return self._holders[block]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of ``keys``; they are not held by the caller until :meth:`hold`."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_serve(self, found: Sequence[int], new: int, spare: int = 0) -> bool:
        """Whether ``found`` can be held and ``new`` more blocks allocated with ``spare`` ones left over."""
        return sum(self._holders[block] == 0 for block in found) + new + spare <= self.num_free

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to each of ``blocks``, as :meth:`find` returned them."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with the caller as only holder; what they cached is forgotten.

        Raises:
            ValueError: Fewer than ``count`` blocks are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key = self._keys[block]
            if key is not None:
                del self._by_key[key]
                self._keys[block] = None
            self._holders[block] = 1
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Make a full, held block findable; the first block of a key stays the one that is found."""
        if self.caching and key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder from each block of a sequence, given in the sequence's order.

        The sequence's end becomes reusable before its beginning, which other prompts are likelier to share;
        blocks that can't be found again come before any that can.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)
