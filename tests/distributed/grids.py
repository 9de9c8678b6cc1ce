"""Functions run on several processes that are forked from one server, which has imported all that is slow.

What a launcher does is tested through runs.py; all else is faster here.
"""

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from multiprocessing.connection import wait

from tests.distributed.runs import ROOT

PRELOADED = ["torch", "deepspeed", "megatron.core", "lomdm_dist.train.loop", "lomdm_dist.parallel.tensor"]
SECONDS = 300


def on_processes(count: int, function, *arguments, seconds: float = SECONDS) -> list:
    """`function(*arguments)` on `count` processes at once, each told its rank as launchers do; the results.

    A failure of one ends all, and is raised with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = context.Pipe(duplex=False)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = context.Process(target=_child, args=(place, theirs, function, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = [None] * count
    try:
        waiting = dict(zip(pipes, range(count), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=seconds)
            assert ready, f"nothing came from ranks {sorted(waiting.values())} for {seconds} seconds"
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise AssertionError(f"rank {rank} died") from None
                assert good, f"rank {rank}: {results[rank]}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def train(overrides: list[str], stop_after: int | None = None, config="configs/demo.yaml") -> None:
    """A whole run of `lomdm train`, in this process."""
    from lomdm_dist.config import load_config
    from lomdm_dist.errors import StoppedOnRequest
    from lomdm_dist.train.loop import train

    with contextlib.suppress(StoppedOnRequest):
        train(load_config(ROOT / config, overrides), resume="auto", stop_after=stop_after)


def _child(place: dict, pipe, function, arguments) -> None:
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        outcome = True, function(*arguments)
    except BaseException:
        outcome = False, traceback.format_exc()
    # pickled here: the pipe's own way to send a tensor is through memory that dies with this process
    pipe.send_bytes(pickle.dumps(outcome))
    os._exit(0)
