"""Folders and files that are whole or absent, and checks of where results go."""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import shutil
import tempfile
from pathlib import Path

from lomdm_dist.errors import UserError

FIGURES = (".png", ".pdf", ".svg")
FULL = 2**20  # bytes: a disk with less room than that is full


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def hold(path: Path, wait: bool = True):
    """Hold a lock file, which is yielded open, against other processes and threads.

    The system frees it when a process ends. Lock files are never deleted: a lock on a deleted file guards
    nothing. BlockingIOError where another holds it, and this one does not wait.
    """
    with open(path, "a+b", buffering=0) as lock:  # to write: NFS refuses to lock what is open to read
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield lock


def is_held(path: Path) -> bool:
    """Whether somebody holds a lock file, which is there."""
    try:
        with hold(path, wait=False):
            return False
    except BlockingIOError:
        return True


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_figure(figure, path: Path, **options) -> None:
    """A figure of matplotlib, whole or not at all; the name's ending says in which form."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.removeprefix("."), **options)
    write_atomically(path, drawn.getvalue())


def check_matplotlib(what: str) -> None:
    """UserError where it is not installed; `what` needs it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(f"{what} needs matplotlib: pip install matplotlib") from None


def check_figure(path: Path) -> None:
    """Before the work: can the figure that `--plot` names be drawn and written? UserError."""
    check_matplotlib("--plot")
    if path.suffix not in FIGURES:
        raise UserError(f"--plot {path}: the name must end in {', '.join(FIGURES)}")
    check_writable(path)


def first_link(folder: Path) -> Path | None:
    """A symbolic link below a folder: what is copied or published from there would be a file of elsewhere."""
    return next((path for path in sorted(folder.rglob("*")) if path.is_symlink()), None)


def check_new(out: Path) -> None:
    """Raises UserError where `out` is there already, but for an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: nothing is overwritten; give another")


@contextlib.contextmanager
def new_folder(out: Path):
    """A folder to fill; it becomes `out` when the block ends well, and is removed otherwise.

    Raises UserError where `out` holds something already, or cannot be made.
    """
    out = out.resolve()
    try:
        check_new(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    try:
        partial.chmod(0o755)
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except Exception as error:  # of the libraries that write there, which do not all say why
        if is_full(partial):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out)) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_full(path: Path) -> bool:
    """Whether the disk of it is; not where it does not say."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).free < FULL
    return False


def check_writable(path: Path) -> None:
    """Before the work: can a result be written to this file? Raises UserError."""
    folder = path.resolve().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if path.is_dir() or not path.name:
            raise IsADirectoryError(0, "it is a folder")
    except OSError as error:
        raise UserError(f"cannot write the result to {path}: {error.strerror}") from None
