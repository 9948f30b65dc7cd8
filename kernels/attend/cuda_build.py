"""CUDA sources to running kernels, in this process: NVRTC, a disk cache, the driver API.

Why a ctypes binding and not cuda-core: cuda-core needs cuda-bindings of the CUDA major in use, so no one
requirement line serves torch builds of CUDA 12 and of CUDA 13; and what is needed of both libraries is a
dozen C functions, the same on Linux and Windows. No nvcc, no other compiler, no child process.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

KERNELS = Path(__file__).resolve().parents[1]
INCLUDE = r'(?m)^#include "(.+)"$'
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DIGEST_BYTES = 32
MOST_HEADS = 65_535  # of all batches: the second dimension of a grid, by CUDA's limit
MOST_JOBS = 8  # compilers at once, about 30 MB each (NVRTC 13)
WINDOWS = sys.platform == "win32"

_lock = threading.RLock()
_modules: dict[tuple, "CudaModule"] = {}


class CudaBuildError(RuntimeError):
    """A kernel could not be compiled, loaded or launched; the message says which and why."""


class CudaModule:
    """The kernels of one compiled source, loaded on one device."""

    def __init__(self, name: str, image: bytes, device: torch.device):
        self.name, self.device = name, device
        self._handle, self._functions = ctypes.c_void_p(), {}
        with torch.cuda.device(device):
            _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), image), f"loading {name}")

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, *params: bytes, shared: int = 0):
        """Run kernel on torch's current stream of the module's device.

        params: one packed argument each (pack). shared: bytes of dynamic shared memory.
        """
        buffers = [ctypes.create_string_buffer(param, len(param)) for param in params]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        x, y, z = (*grid, 1, 1)[:3]
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            function = self._function(kernel, shared)
            code = _driver().cuLaunchKernel(function, x, y, z, threads, 1, 1, shared, stream, pointers, None)
        _check(code, f"launching {kernel} of {self.name}")

    def _function(self, kernel, shared):
        if (kernel, shared) not in self._functions:
            function = ctypes.c_void_p()
            code = _driver().cuModuleGetFunction(ctypes.byref(function), self._handle, kernel.encode())
            _check(code, f"looking up {kernel} in {self.name}")
            if shared > 48 * 1024:
                _check(_driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared), f"sizing {kernel}")
            self._functions[kernel, shared] = function
        return self._functions[kernel, shared]


def load_module(source: Path, arch: str, device: torch.device, defines: tuple[str, ...] = ()) -> CudaModule:
    """The kernels of source, compiled for arch ("sm_90a") and loaded on device.

    defines: "NAME=VALUE" each. Compiled on first use, then read from the disk cache, then kept.
    Raises CudaBuildError.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (source, arch, defines, index)
    with _lock:
        if key not in _modules:
            image = cached_cubin(source, arch, defines)
            _modules[key] = CudaModule(source.stem, image, torch.device("cuda", index))
        return _modules[key]


def pack(layout: str, *fields) -> bytes:
    """A C struct: layout as in the struct module, native alignment; tensors and None are pointers."""
    values = (f.data_ptr() if isinstance(f, torch.Tensor) else 0 if f is None else f for f in fields)
    return struct.pack(f"@{layout}0P", *values)


def cached_cubin(source: Path, arch: str, defines: tuple[str, ...] = ()) -> bytes:
    """Machine code of source, from the cache or compiled and cached."""
    key = _cache_key(source, arch, defines)
    path = cache_folder() / f"{source.stem}-{arch}-{key}.cubin"
    cubin = _read_entry(path)
    if cubin is None:
        cubin = compile_cubin(source, arch, defines)[0]
        _write_entry(path, cubin)
    return cubin


def compile_ahead(
    wanted: Iterable[tuple[Path, str, tuple[str, ...]]], advance: Callable[[], None] = lambda: None
) -> None:
    """Fill the disk cache with these (source, arch, defines), as many at a time as there are cores.

    advance() is called after each; what it raises goes to the caller, with nothing left running. What does
    not build is left to load_module, which says why.
    """
    if why_no_build():
        return
    with ThreadPoolExecutor(jobs()) as pool:
        building = [pool.submit(cached_cubin, *one) for one in wanted]
        try:
            for done in as_completed(building):
                with contextlib.suppress(CudaBuildError):
                    done.result()
                advance()
        finally:
            for one in building:
                one.cancel()


def jobs() -> int:
    """How many compilers may run at once."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(usable or 1, MOST_JOBS))


def compile_cubin(source: Path, arch: str, defines: tuple[str, ...] = (), options: tuple[str, ...] = ()):
    """(machine code, compiler log) of source. Its headers are handed over in memory.

    Raises CudaBuildError with the compiler's words, the first error on the message's first line.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    headers = _headers(source)
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (ctypes.c_char_p * len(headers))(*headers.values())
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
    )
    _check_nvrtc(code, f"creating {source.name}")
    try:
        arguments = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{d}" for d in defines), *options]
        encoded = (ctypes.c_char_p * len(arguments))(*(a.encode() for a in arguments))
        code = nvrtc.nvrtcCompileProgram(program, len(arguments), encoded)
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        log = log.rstrip("\0")
        if code:
            first = next((line for line in log.splitlines() if "error" in line), "no error is named")
            raise CudaBuildError(
                f"{source.name} does not build for {arch} with NVRTC {nvrtc_version()}: {first}\n{log}"
            )
        return _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def nvrtc_version() -> str:
    """Version of the NVRTC in use, "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "asking for its version")
    return f"{major.value}.{minor.value}"


@functools.cache
def why_no_build() -> str | None:
    """None where kernels can be compiled, else the reason."""
    try:
        nvrtc_version()
    except CudaBuildError as error:
        return str(error)
    return None


@functools.cache
def cache_folder() -> Path:
    """kernels/.cache, or the user's cache folder where that cannot be written."""
    user = os.environ.get("LOCALAPPDATA") if WINDOWS else os.environ.get("XDG_CACHE_HOME")
    fallback = Path(user) if user else Path.home() / ".cache"
    for folder in (KERNELS / ".cache", fallback / "comfyui-vc-attention"):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return Path(tempfile.mkdtemp(prefix="comfyui-vc-attention-"))


def _headers(source):
    """The text of every header that source includes, directly or not, by name; each stage has some."""
    known = {path.name: path for path in KERNELS.glob("*/csrc/*.cuh")}
    texts, pending = {}, [source.read_bytes()]
    while pending:
        for name in re.findall(INCLUDE, pending.pop().decode()):
            if name not in texts:
                if name not in known:
                    raise CudaBuildError(f"{source.name} includes {name}, which is in no kernels/*/csrc")
                texts[name] = known[name].read_bytes()
                pending.append(texts[name])
    return dict(sorted(texts.items()))


def _cache_key(source, arch, defines):
    digest = hashlib.sha256()
    parts = [arch, nvrtc_version(), *defines, source.read_bytes()]
    for name, text in _headers(source).items():
        parts += [name, text]
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def _read_entry(path):
    """A cached cubin; None if there is none or its digest does not fit."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, cubin = entry[:DIGEST_BYTES], entry[DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _write_entry(path, cubin):
    """Another process sees the whole entry or none: written aside, then renamed."""
    # a full or vanished disk only costs the next process a compilation
    with contextlib.suppress(OSError):
        handle, aside = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
            os.replace(aside, path)
        except OSError:
            # on Windows a reader of the same entry blocks the rename: it has what we would write
            os.unlink(aside)


def _fetch(size_of, read, program):
    size = ctypes.c_size_t()
    _check_nvrtc(size_of(program, ctypes.byref(size)), "reading a size")
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(read(program, buffer), "reading a result")
    return buffer.raw


def _check_nvrtc(code, doing):
    if code:
        _nvrtc().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CudaBuildError(f"NVRTC failed {doing}: {_nvrtc().nvrtcGetErrorString(code).decode()}")


def _check(code, doing):
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise CudaBuildError(f"CUDA error {code} {doing}: {reason}; if it repeats, restart the program")


@functools.cache
def _driver():
    name = "nvcuda.dll" if WINDOWS else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CudaBuildError(f"the NVIDIA driver library {name} does not load: {error}") from None


@functools.cache
def driver_version() -> str:
    """The NVIDIA driver's version, "580.65.06"; "none" without a driver."""
    try:
        library = ctypes.CDLL("nvml.dll" if WINDOWS else "libnvidia-ml.so.1")
    except OSError:
        return "none"
    text = ctypes.create_string_buffer(96)
    failed = library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text))
    return "unknown" if failed else text.value.decode()


@functools.cache
def _nvrtc():
    tried = []
    for path in nvrtc_paths():
        try:
            return _load_nvrtc(path)
        except OSError as error:
            tried.append(f"{path}: {error}")
    nvrtc = "NVRTC, the CUDA compiler library that torch's CUDA builds bring,"
    raise CudaBuildError(f"{nvrtc} does not load: {'; '.join(tried)}" if tried else f"{nvrtc} was not found")


def _load_nvrtc(path):
    # it opens its built-ins by bare name when it compiles: found then only if they are loaded already
    pattern = "nvrtc-builtins64_*.dll" if WINDOWS else "libnvrtc-builtins.so*"
    for builtins in sorted(path.parent.glob(pattern)):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def nvrtc_paths() -> list[Path]:
    """NVRTC libraries on this machine: those of torch's own CUDA major first, torch's folders first."""
    packages = Path(torch.__file__).resolve().parents[1]
    folders = [packages / "torch" / "lib"]
    for place in ("*/lib", "*/bin", "*/bin/x86_64"):
        folders += sorted((packages / "nvidia").glob(place))
    for toolkit in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if toolkit:
            folders += [Path(toolkit) / place for place in ("bin", "bin/x64", "lib64")]
    pattern = "nvrtc64_*_0.dll" if WINDOWS else "libnvrtc.so.*"
    found = [path for folder in folders for path in sorted(folder.glob(pattern), reverse=True)]
    majors = {path: _major(path) for path in found}
    own = int((torch.version.cuda or "0").split(".")[0])
    usable = [path for path in found if majors[path] in (12, 13)]
    # a newer major's machine code does not load under an older driver, so the older one goes first
    return sorted(usable, key=lambda path: (majors[path] != own, majors[path]))


def _major(path):
    """CUDA major in a library's name: libnvrtc.so.13, libnvrtc.so.12.8.93, nvrtc64_130_0.dll."""
    number = re.search(r"\.so\.(\d+)|nvrtc64_(\d+)\d_0", path.name)
    return int(number.group(1) or number.group(2)) if number else 0
