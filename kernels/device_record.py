"""What is known about a card: which kernels passed their self-test there, and from how many tokens they win.

One small JSON file for each card and kernel, in cuda_build's cache folder. A card is its name and capability
with all that could change a kernel on it: driver, torch, Triton, NVRTC, and our own sources. Whatever of that
changes, the old files are simply not found again.

While a kernel is tried for the first time a mark lies beside its file, locked by the process that tries it.
If that process dies, the lock goes and the mark stays: so the next process knows which kernel killed it.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .attend.cuda_build import CudaBuildError, cache_folder, driver_version, nvrtc_version
from .operands import AttentionProblem

PASSED, FAILED, CRASHED = "passed", "failed", "crashed"
KERNELS_FOLDER = Path(__file__).resolve().parent
SOURCES = (".py", ".cu", ".cuh")
WAIT_SECONDS = 0.2  # between two looks at a mark that another process holds
WINDOWS = sys.platform == "win32"


@dataclass(frozen=True)
class Speed:
    """Milliseconds of one call at one length: ours, PyTorch's and, where it is there, comfy-kitchen's."""

    tokens: int
    ours: float
    pytorch: float
    comfy_kitchen: float | None = None

    def __str__(self):
        text = f"{self.tokens:,} tokens: {self.ours:.3f} ms, PyTorch {self.pytorch:.3f} ms"
        return text + (f", comfy-kitchen INT8 {self.comfy_kitchen:.3f} ms" if self.comfy_kitchen else "")


@dataclass(frozen=True)
class Entry:
    """What is known about one kernel on one card."""

    kernel: str
    state: str  # PASSED, FAILED or CRASHED
    reason: str = ""  # why not, a sentence
    checks: list[str] = field(default_factory=list)  # of the self-test, as text
    speeds: list[Speed] = field(default_factory=list)  # shortest first; empty: not timed
    min_tokens: int | None = None  # from here on faster than PyTorch; None: never, or not timed
    seconds: float = 0.0  # building, testing and timing took
    build_seconds: float = 0.0  # of these, what was compiled ahead

    @property
    def why_not(self) -> str | None:
        """None if the kernel may run on this card."""
        return None if self.state == PASSED else self.reason

    @property
    def why_not_auto(self) -> str | None:
        """None if "auto" may take it."""
        if self.state == PASSED and self.speeds and self.min_tokens is None:
            longest = self.speeds[-1]
            ratio = longest.pytorch / longest.ours
            return f"slower than PyTorch's attention on this card ({ratio:.2f}x at {longest.tokens:,} tokens)"
        return self.why_not

    @property
    def outcome(self) -> str:
        """What a first try came to, in a few words."""
        if self.state != PASSED:
            return f"{self.state}: {self.reason}"
        testing = f"tested and timed in {self.seconds - self.build_seconds:.1f} s"
        if self.kernel.startswith("triton"):
            return f"passed: {testing}, compiling included"
        return f"passed: built in {self.build_seconds:.1f} s, {testing}"

    @property
    def summary(self) -> str:
        """What is known, in a few words."""
        if self.state != PASSED:
            return self.reason
        if not self.speeds:
            return "tested on this card, not timed"
        last = self.speeds[-1]
        text = f"tested on this card; {last.pytorch / last.ours:.2f}x PyTorch"
        if last.comfy_kitchen:
            text += f", {last.comfy_kitchen / last.ours:.2f}x comfy-kitchen INT8"
        since = f"faster from {self.min_tokens:,} on" if self.min_tokens else "so auto leaves it"
        return f"{text} at {last.tokens:,} tokens; {since}"


@dataclass(frozen=True)
class CardRecord:
    """The entries of one card; made by record_of."""

    identity: tuple[tuple[str, str], ...]
    folder: Path  # of this card alone

    def entry(self, kernel: str) -> Entry | None:
        """What is known about a kernel; None if nothing, or another process is trying it right now."""
        entry = _read(self._file(kernel), kernel)
        file = None if entry else _open_mark(self._mark(kernel))
        if file is not None:
            with held(file, self._mark(kernel)) as mine:
                if mine:
                    entry = self._closed_mark(kernel)
        return entry

    def entries(self, kernels) -> dict[str, Entry]:
        """By kernel name, those that are known."""
        found = {kernel: self.entry(kernel) for kernel in kernels}
        return {kernel: entry for kernel, entry in found.items() if entry is not None}

    def save(self, entry: Entry) -> None:
        """Another process sees the whole entry or none. An unwritable disk costs only the memory of it."""
        self.remember(entry)
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / "card.json", dict(self.identity))
            _write(self._file(entry.kernel), asdict(entry))

    def remember(self, entry: Entry) -> None:
        """From here on this process knows the entry."""
        _memory[self._key(entry.kernel)] = entry

    def forget(self, kernel: str) -> None:
        """As if the kernel had never been tried."""
        _memory.pop(self._key(kernel), None)
        for path in (self._file(kernel), self._mark(kernel)):
            with contextlib.suppress(OSError):
                path.unlink()

    @contextlib.contextmanager
    def trying(self, kernel: str, waiting: Callable[[], None] = lambda: None) -> Iterator[Entry | None]:
        """Around the first launches of a kernel: its mark lies there. Gives what is known by then.

        Waits while another process tries the same kernel; then its entry is given, and nothing is left to
        try. Meanwhile waiting() is called, which may raise. An orderly end, be it an exception, takes the
        mark away.
        """
        mark = self._mark(kernel)
        while True:
            file = _open_mark(mark, create=True)
            if file is None:
                yield None  # an unwritable disk: no mark, and no memory of a crash
                return
            with held(file, mark) as mine:
                if mine:
                    left_over = file.seek(0, os.SEEK_END) > 0
                    entry = self._closed_mark(kernel) if left_over else _read(self._file(kernel), kernel)
                    if entry is None:
                        file.write(b"testing " + kernel.encode() + b"\n")
                        file.flush()
                        os.fsync(file.fileno())
                    yield entry
                    return
            waiting()
            time.sleep(WAIT_SECONDS)

    def _closed_mark(self, kernel):
        """The mark of a process that is gone: a crash, unless it had come to its end."""
        entry = _read(self._file(kernel), kernel)
        if entry is None:
            reason = "the process ended while this kernel was tried on this card"
            entry = Entry(kernel, CRASHED, f"{reason}; install.py --retest tries it again")
            self.save(entry)
        return entry

    def _key(self, kernel):
        return (*(value for _, value in self.identity[:2]), kernel)

    def _file(self, kernel):
        return self.folder / f"{kernel}.json"

    def _mark(self, kernel):
        return self.folder / f"{kernel}.testing"


_memory: dict[tuple, Entry | None] = {}  # what this process read or wrote, by card, capability and kernel


def record_of(name: str, capability: tuple[int, int] | None) -> CardRecord:
    """The record of a card, by its name as torch says it and its capability."""
    identity = (("card", name), ("capability", str(capability)), *surroundings())
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return CardRecord(identity, cache_folder() / "cards" / digest)


def known(problem: AttentionProblem, kernel: str) -> Entry | None:
    """What is known about a kernel on the card of a problem, read once; None without a card."""
    if not problem.device_name:
        return None
    key = problem.device_name, str(problem.capability), kernel
    if key not in _memory:
        _memory[key] = record_of(problem.device_name, problem.capability).entry(kernel)
    return _memory[key]


@functools.cache
def surroundings() -> tuple[tuple[str, str], ...]:
    """All that, besides the card, decides what a kernel does."""
    try:
        nvrtc = nvrtc_version()
    except CudaBuildError:
        nvrtc = "none"
    versions = {"driver": driver_version(), "torch": torch.__version__, "triton": _triton(), "nvrtc": nvrtc}
    return (*versions.items(), ("sources", source_hash()))


def _triton() -> str:
    """The installed Triton; by its folder's name where possible, since importing it takes 0.25 s."""
    for folder in sorted(Path(torch.__file__).resolve().parents[1].glob("*triton*-*.dist-info")):
        return folder.name.removesuffix(".dist-info")
    try:
        from triton import __version__
    except (ImportError, OSError):
        return "none"
    return __version__


@functools.cache
def source_hash() -> str:
    """Digest of everything in kernels/ that is compiled or run."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS_FOLDER.rglob("*")):
        inside = path.relative_to(KERNELS_FOLDER)
        if path.suffix in SOURCES and not {".cache", "__pycache__"} & set(inside.parts):
            data = path.read_bytes()
            digest.update(f"{inside.as_posix()} {len(data)} ".encode() + data)
    return digest.hexdigest()[:16]


def _open_mark(mark: Path, create: bool = False):
    """The open file; None if there is none, or none can be made."""
    try:
        if create:
            mark.parent.mkdir(parents=True, exist_ok=True)
        # for writing, because Windows and some network disks lock nothing else
        return open(mark, "a+b" if create else "r+b")
    except OSError:
        return None


@contextlib.contextmanager
def held(file, mark: Path) -> Iterator[bool]:
    """Whether this process now holds the opened mark; if it does, the mark is gone afterwards.

    The lock lives as long as the process. A process number in the file would not do: numbers come again.
    """
    mine = _lock(file) and _is_still(file, mark)
    try:
        yield mine
    finally:
        if mine and not WINDOWS:  # before the lock goes, or the next holder's mark would be taken away
            _unlink(mark)
        file.close()
        if mine and WINDOWS:  # an open file cannot be deleted there, nor one that somebody else opened
            _unlink(mark)


def _lock(file) -> bool:
    """Whether no other process holds the file; does not wait. True on disks that have no locks."""
    try:
        if WINDOWS:
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


def _is_still(file, path) -> bool:
    """Whether the path still names the open file: its last holder may have deleted it meanwhile."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _unlink(path):
    with contextlib.suppress(OSError):
        path.unlink()


def _read(path: Path, kernel: str) -> Entry | None:
    """A stored entry; None if there is none, or it is damaged or of another make."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["speeds"] = [Speed(**speed) for speed in stored["speeds"]]
        entry = Entry(**stored)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    sound = entry.kernel == kernel and entry.state in (PASSED, FAILED, CRASHED)
    return entry if sound and isinstance(entry.min_tokens, int | None) else None


def _write(path: Path, content: dict) -> None:
    """Written aside, then renamed. Raises OSError."""
    handle, aside = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(aside, path)
    except OSError:
        _unlink(Path(aside))
        raise
