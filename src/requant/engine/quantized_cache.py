"""The cache of quantized weights as a load meets it: the entry that it reads, or the one that it will leave behind."""

import logging
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from requant.engine.team import Team
from requant.loading import Checkpoint, Plan
from requant.loading.cache import Entry, Identity, Store, Writer, identify, make_writer, new_nonce
from requant.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadCache:
    """What a load needs of the cache; a context that holds on to the entry.

    Attributes:
        store: The cache.
        identity: What an entry of this load is for.
        entry: It; None: there is none, and the load makes one.
        nonce: Of this load, the same on all its ranks.
    """

    store: Store
    identity: Identity
    entry: Entry | None
    nonce: int

    def make_writer(self, plan: Plan, model: nn.Module) -> Writer | None:
        """What writes the entry, if there is none yet."""
        if self.entry is not None:
            return None
        return make_writer(self.store, self.identity, plan, model, self.nonce)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.entry is not None:
            self.entry.close()


def open_cache(
    folder: str | None, checkpoint: Checkpoint, recipe: Recipe, name: str, team: Team, device: torch.device
) -> LoadCache | None:
    """Look into the cache; the ranks of a team do so together, and read an entry only if all of them see it.

    Args:
        folder: The cache; None: there is none.
        checkpoint: The headers.
        recipe: What to quantize.
        name: The model as the user named it.
        team: The ranks.
        device: This rank's.

    Raises:
        ConfigError: There is no entry, and none can be written.
        CheckpointError: The checkpoint cannot be read.
    """
    if folder is None:
        return None
    if not recipe:
        logger.info("nothing is quantized: the cache %s is not used", folder)
        return None
    store, identity = Store(Path(folder)), identify(checkpoint, recipe, name)
    entry = store.find(identity)
    nonce = new_nonce()
    if team.ranks.size > 1:
        nonce = team.smallest(nonce, device)
        if not team.smallest(int(entry is not None), device) and entry is not None:
            entry.close()
            entry = None
    if entry is None:
        store.check_writable()
    else:
        logger.info("quantized weights are read from %s", entry.folder)
    return LoadCache(store, identity, entry, nonce)
