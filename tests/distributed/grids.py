"""Functions run on several processes that are forked from one server, which has imported all that is slow.

What a launcher does is tested through runs.py; all else is faster here.
"""

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

from tests.distributed.runs import ROOT

PRELOADED = ["tests.distributed.preloaded"]
SECONDS = 300


def on_processes(count: int, function, *arguments, seconds: float = SECONDS) -> list:
    """`function(*arguments)` on `count` processes at once, each told its rank as launchers do; the results.

    A failure of one ends all, and is raised with its traceback.
    """
    context, pipes, processes = _forking(), [], []
    for place in _places(count):
        ours, theirs = context.Pipe(duplex=False)
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


def ends_of(
    count: int, folder: Path, function, *arguments, seconds: float = SECONDS
) -> list[tuple[int, str]]:
    """The same, where some may die: exit status (as the command line's) and output of each, in `folder`."""
    processes, outputs = begin(count, folder, function, *arguments)
    return end(processes, outputs, seconds)


def begin(count: int, folder: Path, function, *arguments) -> tuple[list, list[Path]]:
    """The processes, under way, and the files that they write to."""
    context = _forking()
    outputs = [folder / f"output-{rank}.txt" for rank in range(count)]
    processes = [
        context.Process(target=_to_the_end, args=(place, output, function, arguments), daemon=True)
        for place, output in zip(_places(count), outputs, strict=True)
    ]
    for process in processes:
        process.start()
    return processes, outputs


def end(processes: list, outputs: list[Path], seconds: float = SECONDS) -> list[tuple[int, str]]:
    """Wait for all of them; exit status and output of each."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    texts = [output.read_text() if output.exists() else "" for output in outputs]
    assert not late, f"ranks {late} did not end in {seconds} seconds: {texts}"
    return [(process.exitcode, text) for process, text in zip(processes, texts, strict=True)]


def _forking():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _places(count: int) -> list[dict]:
    """What a launcher tells each rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]


def train(overrides: list[str], stop_after: int | None = None, config="configs/demo.yaml") -> None:
    """A whole run of `lomdm train`, in this process."""
    from lomdm_dist.config import load_config
    from lomdm_dist.errors import StoppedOnRequest
    from lomdm_dist.train.loop import train

    with contextlib.suppress(StoppedOnRequest):
        train(load_config(ROOT / config, overrides), resume="auto", stop_after=stop_after)


def command_line(words: list, environment: dict[str, str] | None = None) -> None:
    """`lomdm WORDS` in this process, to its end: for `ends_of`."""
    from lomdm_dist.cli import main

    os.environ |= environment or {}
    sys.argv, status = ["lomdm", *map(str, words)], 0
    try:
        main()
    except SystemExit as stopped:
        status = stopped.code or 0
    except BaseException:  # as Python itself would
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    os._exit(status)


def _begin(place: dict) -> None:
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def _to_the_end(place: dict, output: Path, function, arguments) -> None:
    from lomdm_dist.errors import MISTAKE, RunFailed, UserError

    _begin(place)
    with open(output, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 0
    try:
        function(*arguments)
    except (UserError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        status = MISTAKE if isinstance(error, UserError) else error.status
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def _child(place: dict, pipe, function, arguments) -> None:
    _begin(place)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        outcome = True, function(*arguments)
    except BaseException:
        outcome = False, traceback.format_exc()
    # pickled here: the pipe's own way to send a tensor is through memory that dies with this process
    pipe.send_bytes(pickle.dumps(outcome))
    os._exit(0)
