"""Units of a preparation spread over processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import cache
from typing import Any

from lit_pretrain.corpus.encode import Encoding, encode_unit
from lit_pretrain.corpus.sources import Piece
from lit_pretrain.corpus.tokenizer import TokenizerFile
from lit_pretrain.errors import DataError


def encode_units(units: Mapping[int, Sequence[Piece]], *, encoding: Encoding, workers: int) -> Iterator[int]:
    """Encode units, in any order; each lies in its folder when its number is given.

    Args:
        units: Number to pieces.
        encoding: As for all units.
        workers: Processes; 0 works in this one.

    Raises:
        DataError: A unit failed, or a worker was killed.
    """
    if not workers:
        tokenizer = TokenizerFile(encoding.tokenizer, eos_token=encoding.eos_token)
        for number, pieces in units.items():
            for _ in encode_unit(pieces, number, encoding=encoding, tokenizer=tokenizer):
                pass
            yield number
        return
    # Spawned: a fork would share locks and the threads' state of the tokenizer library, and keep our lock alive.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    threads = context.Value("i", threads_each(workers, len(units)))
    pool = ProcessPoolExecutor(
        min(workers, len(units)), mp_context=context, initializer=_begin, initargs=(encoding, stop, threads)
    )
    try:
        futures = [pool.submit(_encode, pieces, number) for number, pieces in units.items()]
        for finished, done in enumerate(as_completed(futures), 1):
            threads.value = threads_each(workers, len(units) - finished)
            yield done.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed (out of memory?); run the same command again to go on where it stopped, with "
            "fewer workers=... if memory was short."
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def threads_each(workers: int, unfinished: int) -> int:
    """Threads for each unit in work: with fewer units than workers, the last ones share the idle cores."""
    return max(1, workers // max(1, unfinished))


@cache
def _state() -> dict[str, Any]:
    """What a worker process keeps between units."""
    return {}


def _begin(encoding: Encoding, stop: Any, threads: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches the whole process group: the parent decides, and sets ``stop``.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as many processes as cores: threads would get in each other's way
    tokenizer = TokenizerFile(encoding.tokenizer, eos_token=encoding.eos_token)
    _state().update(encoding=encoding, tokenizer=tokenizer, stop=stop, threads=threads)


def _encode(pieces: Sequence[Piece], number: int) -> int:
    state = _state()
    with closing(encode_unit(pieces, number, encoding=state["encoding"], tokenizer=state["tokenizer"])) as steps:
        for _ in steps:
            if state["stop"].is_set():
                break  # closing removes what is half finished
            _use_threads(state["threads"].value)
    return number


def _use_threads(number: int) -> None:
    """Let the library use threads as soon as cores are idle; it reads the first variable at every call."""
    if number > 1 and os.environ["TOKENIZERS_PARALLELISM"] == "false":
        os.environ.setdefault("RAYON_NUM_THREADS", str(number))  # read once, when the first batch is shared out
        os.environ["TOKENIZERS_PARALLELISM"] = "true"


def _end_with_parent() -> None:
    """The pool's queues never end for a worker whose parent was killed; what it leaves half finished is never read."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
