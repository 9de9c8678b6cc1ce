"""Where files come from: a folder, a URL that fsspec opens, or a command; and the local cache of shards.

    data/owt/train                        a folder
    https://host/owt/train  s3://...      any URL that fsspec knows
    pipe:ssh host cat /data/owt/train/{}  a shell command that prints the file {}

A cached shard is named by its checksum and was compared with it when it came: that it is there means
that it is whole. The cache is bounded; what was used longest ago goes first.
"""

import contextlib
import errno
import hashlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import fsspec

from lomdm_dist.errors import UserError
from lomdm_dist.files import hold, is_held, write_atomically
from lomdm_dist.secrets import HIDDEN

PIPE, PLACE = "pipe:", "{}"
TRIES = 5
ROOM = "room.lock"  # of the cache: held while its contents are counted or change their names
SECONDS_BETWEEN = 1.0  # the first two tries; then twice as long each time
SECONDS_TO_CONNECT, SECONDS_OF_SILENCE = 20, 60
BLOCK = 2**20
LARGEST_SMALL_FILE = 2**30  # a manifest, a file of a tokenizer


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lomdm_dist"


@dataclass(frozen=True)
class Access:
    """How shards are reached: what is verified of them, and the cache of remote ones."""

    verify: str = "checksum"  # or "size"
    cache: Path | None = None  # default: cache_home()
    cache_bytes: int = 64 * 2**30

    @property
    def folder(self) -> Path:
        return self.cache or cache_home()

    def found_good(self, file: BinaryIO, what: str) -> bool:
        """Whether this machine has checked this very file before, and found it to be `what`."""
        return _stamp(file, what) in _known_good(self.folder)

    def remember_good(self, file: BinaryIO, what: str) -> None:
        stamp = _stamp(file, what)
        _known_good(self.folder).add(stamp)
        with contextlib.suppress(OSError):  # a home that cannot be written to: it is checked again, then
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "verified.txt", "a") as known:
                known.write(stamp + "\n")


def _stamp(file: BinaryIO, what: str) -> str:
    facts = os.fstat(file.fileno())
    return f"{what} {facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"


_good: dict[Path, set[str]] = {}
_good_lock = threading.Lock()


def _known_good(folder: Path) -> set[str]:
    with _good_lock:
        if folder not in _good:
            try:
                _good[folder] = set((folder / "verified.txt").read_text(errors="replace").splitlines())
            except OSError:
                _good[folder] = set()
        return _good[folder]


class Damaged(UserError):
    """A remote file that is not there, or not what its manifest lists: no trouble of the way to it."""


def is_remote(location: str) -> bool:
    return location.startswith(PIPE) or "://" in location


class Store:
    """The files of one shard folder. Raises UserError, FileNotFoundError of what is not there."""

    def __init__(self, location: str, access: Access):
        self.remote = is_remote(location)
        self.location = location if self.remote else str(Path(location))
        if self.remote and HIDDEN in location:
            raise UserError(f"{location!r} was saved without its secret ({HIDDEN}): say it anew, whole")
        if location.startswith(PIPE) and PLACE not in location:
            raise UserError(f"{location!r}: write {PLACE} where the command takes the file's name")
        self.access = access

    def name_of(self, file: str) -> str:
        """The whole name of a file, for reading and for messages; `../` steps are taken."""
        if self.location.startswith(PIPE):
            name = self.location.removeprefix(PIPE).replace(PLACE, file)
        else:
            name = f"{self.location.rstrip('/')}/{file}"
        return re.sub(r"(?<=[^/]/)[^/]+/\.\./", "", name)

    def read(self, file: str) -> bytes:
        """A small file, whole."""
        if not self.remote:
            return Path(self.location, file).read_bytes()
        with tempfile.TemporaryFile() as copy:
            self._fetch(file, copy, LARGEST_SMALL_FILE)
            copy.seek(0)
            return copy.read()

    def open(self, file: str, sha256: str, size: int) -> BinaryIO:
        """A shard, open for reading; a remote one is brought into the cache first."""
        if not self.remote:
            return open(Path(self.location, file), "rb")

        def fetch(copy: BinaryIO) -> None:
            self._fetch(file, copy, size, sha256)

        return _cached(self.access, sha256, size, fetch)

    def is_cached(self, sha256: str) -> bool:
        return (self.access.folder / "shards" / f"{sha256}.tar").exists()

    def forget(self, sha256: str) -> None:
        """Take a shard out of the cache, where it was damaged."""
        (self.access.folder / "shards" / f"{sha256}.tar").unlink(missing_ok=True)

    def tokenizer_folder(self, files: list[str]) -> Path:
        if not self.remote:
            return Path(self.location).resolve().parent / "tokenizer"
        name = hashlib.sha256(self.name_of("../tokenizer").encode()).hexdigest()
        folder = self.access.folder / "tokenizers" / name
        for file in files:
            content = self.read(f"../tokenizer/{file}")
            with _using(folder):
                write_atomically(folder / file, content)
        return folder

    def _fetch(self, file: str, copy: BinaryIO, most: int, sha256: str | None = None) -> None:
        """Copy a remote file of at most so many bytes, with a few tries. UserError, Damaged."""
        name = self.name_of(file)
        for attempt in range(1, TRIES + 1):
            copy.seek(0)
            try:
                if self.location.startswith(PIPE):
                    _run(name, copy, most)
                else:
                    _download(name, copy, most)
                copy.truncate(_position(copy))
                if sha256 is None or _sha256(copy) == sha256:
                    return
                reason, damaged = "it is not what its manifest lists: its checksum differs", True
            except ImportError as error:
                hint = "pip install -e '.[remote]'"
                raise UserError(f"cannot read {name}: {error} ({hint})") from None
            except Exception as error:  # each file system has its own kinds
                if isinstance(error, FileNotFoundError) and error.__cause__:
                    error = error.__cause__  # fsspec says "not found" of a host out of reach, too
                damaged = isinstance(error, FileNotFoundError) or getattr(error, "status", None) == 404
                reason = "it is not there" if damaged else _in_a_line(error)
                if damaged or getattr(error, "errno", None) == errno.ENOSPC:
                    attempt = TRIES  # asking again will not help
            if attempt == TRIES:
                raise (Damaged if damaged else UserError)(f"cannot read {name}: {reason}")
            time.sleep(SECONDS_BETWEEN * 2 ** (attempt - 1))


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _position(copy: BinaryIO) -> int:
    """Where the next byte goes, also where another process wrote the last."""
    copy.flush()
    return os.lseek(copy.fileno(), 0, os.SEEK_CUR)


def _sha256(copy: BinaryIO) -> str:
    copy.flush()
    copy.seek(0)
    return hashlib.file_digest(copy, "sha256").hexdigest()


def _download(url: str, copy: BinaryIO, most: int) -> None:
    options = {}
    if url.startswith("http"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=SECONDS_TO_CONNECT, sock_read=SECONDS_OF_SILENCE
        )
        options = {"client_kwargs": {"timeout": timeout}, "block_size": 0}  # 0: one stream, no seeking
    with fsspec.open(url, "rb", **options) as remote:
        while block := remote.read(BLOCK):
            copy.write(block)
            _check_size(copy.tell(), most)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise OSError(f"it has more than the {most:,} bytes that it should have")


def _run(command: str, copy: BinaryIO, most: int) -> None:
    """Run a shell command and keep what it prints. OSError where it fails or falls silent."""
    process = subprocess.Popen(
        command,
        shell=True,
        stdout=copy,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        before, since = -1, time.monotonic()
        while time.monotonic() - since < SECONDS_OF_SILENCE:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, said = process.communicate(timeout=min(1, SECONDS_OF_SILENCE))
                _check_size(_position(copy), most)
                if process.returncode:
                    last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                    raise OSError(f"the command ended with status {process.returncode}: {last[0]}")
                return
            size = _position(copy)
            _check_size(size, most)
            if size != before:
                before, since = size, time.monotonic()
        raise OSError(f"the command printed nothing for {SECONDS_OF_SILENCE} seconds")
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cached(access: Access, sha256: str, size: int, fetch) -> BinaryIO:
    """The file with this checksum from the cache, fetched where it is not there. One process fetches it."""
    path = access.folder / "shards" / f"{sha256}.tar"
    partial = path.with_suffix(".partial")
    with _using(path.parent), hold(path.with_suffix(".lock")):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == size:
                os.utime(path)  # used last now
                return open(path, "rb")
        try:
            with open(partial, "w+b") as copy:
                while not _reserve(access, size, copy):
                    time.sleep(SECONDS_BETWEEN)
                fetch(copy)
                copy.flush()
                os.fsync(copy.fileno())
            file = open(partial, "rb")  # noqa: SIM115
            with hold(path.with_name(ROOM)):  # or who counts meanwhile counts it under both names
                partial.rename(path)
            return file
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _using(folder: Path):
    """A folder of the cache; what goes wrong with it is a UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot use the cache {folder}: {error.strerror or error}; set data.cache") from None


def _reserve(access: Access, size: int, copy: BinaryIO) -> bool:
    """Drop what was used longest ago until `size` more bytes fit, and hold them for `copy`.

    False where what others are fetching leaves no room for now. UserError where there never is any.
    """
    if size > access.cache_bytes:
        raise UserError(
            f"data.cache_gib {access.cache_bytes / 2**30:.3g} is less than one shard ({size / 2**30:.3g} GiB)"
        )
    folder = access.folder / "shards"
    with hold(folder / ROOM):
        for partial in folder.glob("*.partial"):
            if partial.name != Path(copy.name).name and not is_held(partial.with_suffix(".lock")):
                partial.unlink(missing_ok=True)  # of a process that was killed
        used = sum(_size(path) for path in folder.glob("*.partial"))
        shards = sorted(folder.glob("*.tar"), key=_last_use)
        used += sum(map(_size, shards))
        for path in shards:
            if used + size > access.cache_bytes:
                used -= _size(path)
                path.unlink(missing_ok=True)
        if used + size > access.cache_bytes:
            return False
        copy.truncate(size)
        return True


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _last_use(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0
