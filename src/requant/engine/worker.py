"""A rank that follows: it computes what rank 0 announces, and has neither requests nor a scheduler."""

import gc
import signal
import threading
from multiprocessing.connection import Connection

from requant.engine.config import EngineConfig
from requant.engine.core_process import exit_with_parent, give_up
from requant.engine.logs import configure_logging
from requant.engine.seat import Seat


def run_worker(connection: Connection, config: EngineConfig, seat: Seat) -> None:
    """Main function of a worker's process: build its share of the model, then follow rank 0 until that is gone.

    Args:
        connection: Takes a last word; the process ends when its other end closes.
        config: What to build.
        seat: The rank's place among the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging("warning", f"rank {seat.rank}: ")
    threading.Thread(target=exit_with_parent, args=(connection,), daemon=True).start()
    try:
        _follow(config, seat)
    except Exception as error:
        give_up(connection, error)


def _follow(config: EngineConfig, seat: Seat) -> None:
    # Imported here: the front end, which only names this module's function, does without torch.
    from requant.engine.build import load_rank
    from requant.engine.team import join

    seat.pulse.live(seat.rank)  # not before: libraries are loaded with Python's lock held, from a slow disk for long
    with join(seat, config.parallel) as team:
        runner = load_rank(config, team).runner
        gc.freeze()
        team.counts = True
        while True:
            runner.follow(team.next_step())
