"""Remote shards through the bounded cache: URLs, commands, and what can go wrong with them."""

import contextlib
import http.server
import multiprocessing
import os
import socketserver
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lomdm_dist.data import store
from lomdm_dist.data.reader import Reader
from lomdm_dist.data.shards import BadShard, ShardSet
from lomdm_dist.data.store import Access
from lomdm_dist.errors import UserError
from tests.data.made import write_shards

SIZES = [40, 30, 20, 10]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(store, "SECONDS_BETWEEN", 0.0)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_shards(tmp_path / "remote/train", SIZES, tokenizer_files=["tokenizer.json"])
    (tmp_path / "remote/tokenizer").mkdir()
    (tmp_path / "remote/tokenizer/tokenizer.json").write_text("{}")
    return tmp_path / "remote/train"


@contextlib.contextmanager
def served(folder: Path, answer=None):
    """A web server over a folder; yields its URL and the list of paths asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if answer is None or not answer(self):
                super().do_GET()

        def log_message(self, *_):
            pass

    class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def all_ids(shards: ShardSet) -> list[int]:
    return shards.rows(np.arange(len(shards)))[:, 0].tolist()


def test_every_kind_of_place_gives_the_same_rows(folder, tmp_path):
    memory = fsspec.filesystem("memory")
    for path in folder.parent.rglob("*.*"):
        memory.pipe(f"/owt/{path.relative_to(folder.parent)}", path.read_bytes())
    with served(folder.parent) as (url, _):
        places = (folder, f"{url}/train", "memory://owt/train", f"pipe:cat {folder}/{{}}")
        for k, place in enumerate(places):
            shards = ShardSet(place, Access(cache=tmp_path / f"cache{k}"))
            assert all_ids(shards) == list(range(100)), place
            assert (shards.tokenizer_folder() / "tokenizer.json").read_text() == "{}"
            assert shards.manifest == ShardSet(folder).manifest


def test_a_shard_comes_once_for_all_processes(folder, tmp_path):
    def slowly(request):
        time.sleep(0.05)

    with served(folder.parent, slowly) as (url, asked):
        read = partial(_read_all, f"{url}/train", tmp_path / "cache")
        with multiprocessing.get_context("fork").Pool(3) as pool:
            assert pool.map(read, range(3)) == [list(range(100))] * 3
        assert sorted(p for p in asked if p.endswith(".tar")) == [f"/train/{k:05d}.tar" for k in range(4)]


def _read_all(url, cache, _):
    return all_ids(ShardSet(url, Access(cache=cache)))


def test_the_cache_is_bounded_and_drops_what_was_used_longest_ago(folder, tmp_path):
    size = (folder / "00000.tar").stat().st_size
    access = Access(cache=tmp_path / "cache", cache_bytes=2 * size)
    with served(folder) as (url, asked):
        shards = ShardSet(url, access)
        assert all_ids(shards) == list(range(100))
        assert _names(tmp_path / "cache") == {s.sha256 for s in shards.manifest.shards[2:]}
        asked.clear()
        shards.rows(np.array([95, 5]))  # of shards 3, which is there, and 0, for which 2 makes room
        assert asked == ["/00000.tar"]
        assert _names(tmp_path / "cache") == {shards.manifest.shards[k].sha256 for k in (0, 3)}


def _names(cache: Path) -> set[str]:
    return {path.stem for path in (cache / "shards").glob("*.tar")}


def test_parallel_fetches_wait_for_room(folder, tmp_path):
    """Ten at once, of shards of which two fit."""
    size = (folder / "00000.tar").stat().st_size
    place = f"file://{write_shards(tmp_path / 'ten', [5] * 10)}"
    shards = ShardSet(place, Access(cache=tmp_path / "cache", cache_bytes=int(2.2 * size)))
    (tmp_path / "cache/shards").mkdir(parents=True)
    (tmp_path / "cache/shards/of_a_killed_process.partial").write_bytes(bytes(size))
    peak, done = [], threading.Event()

    def look():
        while not done.is_set():
            peak.append(sum(store._size(p) for p in (tmp_path / "cache/shards").iterdir()))

    watcher = threading.Thread(target=look)
    watcher.start()
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(shards.fetch, range(10)))
    done.set()
    watcher.join()
    assert max(peak) <= 3.2 * size  # and the killed one's, until it was seen
    assert len(_names(tmp_path / "cache")) == 2 and not list((tmp_path / "cache/shards").glob("*.partial"))


def test_a_window_too_large_for_the_cache_is_refused_with_the_arithmetic(folder, tmp_path):
    size = (folder / "00000.tar").stat().st_size
    access = Access(cache=tmp_path / "cache", cache_bytes=3 * size)
    place = f"pipe:cat {folder}/{{}}"
    with pytest.raises(UserError, match=r"GiB, data\.cache_gib is .*: set data\.window to 1 shards or fewer"):
        Reader([ShardSet(place, access)])
    reader = Reader([ShardSet(place, access)], window=1)
    flat = reader.read(0, 200).ids[:, 0].tolist()
    assert sorted(flat[:100]) == sorted(flat[100:]) == list(range(100))


def test_the_next_window_is_fetched_ahead(folder, tmp_path):
    with served(folder) as (url, asked):
        reader = Reader([ShardSet(url, Access(cache=tmp_path / "cache"))], window=1)
        reader.read(0, 1)
        deadline = time.time() + 20
        while len(_names(tmp_path / "cache")) < 2:
            assert time.time() < deadline, asked
            time.sleep(0.01)


def error_of(place, tmp_path, kind=UserError) -> str:
    """What reading a sequence of the first shard says."""
    with pytest.raises(kind) as error:
        ShardSet(place, Access(cache=tmp_path / "cache")).rows(np.array([5]))
    assert type(error.value) is kind and not list((tmp_path / "cache/shards").glob("*.partial"))
    return str(error.value)


def test_what_comes_altered_is_refused_and_not_kept(folder, tmp_path):
    path = folder / "00000.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with served(folder) as (url, asked):
        said = error_of(url, tmp_path, BadShard)
        assert said == f"cannot read {url}/00000.tar: it is not what its manifest lists: its checksum differs"
        assert asked.count("/00000.tar") == 2 * store.TRIES  # the copy might have been at fault
    assert not _names(tmp_path / "cache")


def test_what_comes_too_long_is_not_read_to_its_end(folder, tmp_path):
    def pour(request):
        if request.path == "/00000.tar":
            request.send_response(200)
            request.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(2000):
                    request.wfile.write(bytes(2**20))
            return True

    with served(folder, pour) as (url, _):
        assert "it has more than the 10,240 bytes that it should have" in error_of(url, tmp_path)
    script = f"case {{}} in *.tar) cat /dev/zero;; *) cat {folder}/{{}};; esac"
    assert "it has more than the 10,240 bytes" in error_of(f"pipe:{script}", tmp_path)


def test_a_missing_file_a_dead_host_and_a_failing_command_are_named(folder, tmp_path):
    (folder / "00000.tar").unlink()
    with served(folder) as (url, asked):
        assert error_of(url, tmp_path, BadShard) == f"cannot read {url}/00000.tar: it is not there"
        assert asked.count("/00000.tar") == 2
    with pytest.raises(UserError, match=rf"cannot read {url}/manifest\.json: Cannot connect"):
        ShardSet(url)
    message = error_of(f"pipe:cat {folder}/{{}}", tmp_path)
    assert "the command ended with status 1: cat:" in message
    with pytest.raises(UserError, match=r"write \{\} where the command takes the file's name"):
        ShardSet("pipe:cat x")
    with pytest.raises(UserError, match=r"cannot read nofs://x/manifest\.json: .*nofs"):
        ShardSet("nofs://x")


def test_a_cache_that_cannot_be_used_is_an_error_and_no_bad_shard(folder, tmp_path):
    (tmp_path / "cache").write_text("a file")
    reader = Reader([ShardSet(f"file://{folder}", Access(cache=tmp_path / "cache"))], on_bad_shard="skip")
    with pytest.raises(UserError, match=r"cannot use the cache .*; set data\.cache"):
        reader.read(0, 10)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:1000], lambda data: data[:-1] + b"x", lambda data: b""]
)
def test_what_is_damaged_in_the_cache_comes_again(folder, tmp_path, damage):
    access = Access(cache=tmp_path / "cache")
    assert all_ids(ShardSet(f"file://{folder}", access)) == list(range(100))
    for path in (tmp_path / "cache/shards").glob("*.tar"):
        path.write_bytes(damage(path.read_bytes()))
    assert all_ids(ShardSet(f"file://{folder}", access)) == list(range(100))


def test_threads_and_processes_share_a_cache_that_is_too_small_for_all(tmp_path):
    """Shards come, go and come again while others read them: never a wrong row."""
    sizes = [20] * 12
    place = f"file://{write_shards(tmp_path / 'train', sizes, length=7)}"
    cache = tmp_path / "cache", 3 * (tmp_path / "train/00000.tar").stat().st_size
    processes = [
        multiprocessing.get_context("fork").Process(target=_read_at_random, args=(place, *cache, seed))
        for seed in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def _read_at_random(place, cache, cache_bytes, seed):
    shards = ShardSet(place, Access(cache=cache, cache_bytes=cache_bytes))

    def read(thread):
        draws = np.random.default_rng([seed, thread])
        for _ in range(40):
            indices = draws.integers(0, len(shards), 6)
            assert (shards.rows(indices) == indices[:, None]).all()
        return True

    with ThreadPoolExecutor(4) as pool:
        if not all(pool.map(read, range(4))):
            os._exit(1)


def test_garbage_among_the_stamps_is_ignored(folder, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/verified.txt").write_bytes(b"\xff\xfe\n\x00")
    assert all_ids(ShardSet(folder, Access(cache=tmp_path / "cache"))) == list(range(100))


@pytest.mark.parametrize(
    ("location", "tokenizer"),
    [
        ("https://host/owt/train", "https://host/owt/tokenizer/f"),
        ("https://host:80", "https://host:80/../tokenizer/f"),
        ("pipe:cat '/a b/my train/{}'", "cat '/a b/tokenizer/f'"),
        ("pipe:ssh host cat train/{}", "ssh host cat train/../tokenizer/f"),
    ],
)
def test_the_tokenizer_lies_beside_the_split(location, tokenizer):
    assert store.Store(location, Access()).name_of("../tokenizer/f") == tokenizer


def test_a_stuck_download_does_not_hold_up_the_end_of_a_process(folder):
    script = f"case {{}} in *.tar) sleep 1000;; *) cat {folder}/{{}};; esac"
    code = (
        "import sys; from lomdm_dist.data.reader import Reader; from lomdm_dist.data.shards import ShardSet\n"
        "stream = Reader([ShardSet(sys.argv[1])]).stream(0, 4, 4, 2, waiting=lambda: sys.exit(7))\n"
        "next(stream)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, f"pipe:{script}"]
    assert subprocess.run(command, env=environment, timeout=60).returncode == 7


def test_a_server_that_fails_for_a_moment_is_asked_again(folder, tmp_path):
    failed = []

    def fail_twice(request):
        if request.path == "/00000.tar" and len(failed) < 2:
            failed.append(request.path)
            request.send_error(503)
            return True

    with served(folder, fail_twice) as (url, _):
        assert ShardSet(url, Access(cache=tmp_path / "cache")).rows(np.array([5]))[0, 0] == 5


def test_silence_ends_with_an_error(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SECONDS_OF_SILENCE", 0.3)
    monkeypatch.setattr(store, "TRIES", 1)

    def fall_silent(request):
        if request.path == "/00000.tar":
            request.send_response(200)
            request.end_headers()
            time.sleep(3)
            return True

    with served(folder, fall_silent) as (url, _):
        assert error_of(url, tmp_path).startswith(f"cannot read {url}/00000.tar: ")
    script = f"case {{}} in *.tar) sleep 60;; *) cat {folder}/{{}};; esac"
    assert "the command printed nothing for 0.3 seconds" in error_of(f"pipe:{script}", tmp_path)


def test_a_machine_checks_a_file_once(folder, tmp_path, monkeypatch):
    access = Access(cache=tmp_path / "cache")
    all_ids(ShardSet(folder, access))
    store._good.clear()  # as in a new process
    calls = []
    monkeypatch.setattr(Access, "remember_good", lambda *_: calls.append(1))
    all_ids(ShardSet(folder, access))
    assert not calls
    path = folder / "00001.tar"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # even with the old time
    with pytest.raises(UserError, match=r"00001\.tar was altered"):
        all_ids(ShardSet(folder, access))
