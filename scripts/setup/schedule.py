"""Makes pieces side by side, each after those that it needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from pieces import Piece, Workshop


def make_pieces(missing: Sequence[Piece], workshop: Workshop) -> None:
    """Make all pieces.

    Raises:
        Failed: one could not be made. Those that were under way are ended.
    """
    waiting = list(missing)
    running: dict[Future[None], Piece] = {}
    with ThreadPoolExecutor(max_workers=len(waiting)) as pool:
        try:
            while waiting or running:
                unfinished = {piece.name for piece in (*waiting, *running.values())}
                for piece in [p for p in waiting if unfinished.isdisjoint(p.needs)]:
                    waiting.remove(piece)
                    running[pool.submit(_make, piece, workshop)] = piece
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    future.result()
        except BaseException:
            workshop.processes.kill()
            raise


def _make(piece: Piece, workshop: Workshop) -> None:
    began = time.monotonic()
    piece.make_from_the_start(workshop)
    print(f"  {piece.name:22} {time.monotonic() - began:4.0f} s", flush=True)
