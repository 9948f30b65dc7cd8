"""Building CUDA sources without a GPU: what the compiler says of them, and what the disk cache survives."""

import tempfile
import threading
import time

import pytest
from comfyui_vc_attention.kernels.attend import cuda_build

reason = cuda_build.why_no_build()
needs_nvrtc = pytest.mark.skipif(reason is not None, reason=str(reason))
TINY = 'extern "C" __global__ void fill(float* x) { x[threadIdx.x] = VALUE; }'


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "tiny.cu"
    path.write_text(TINY)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(cuda_build, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def compilations(monkeypatch):
    """The number of times a source was really compiled."""
    seen, real = [], cuda_build.compile_cubin
    monkeypatch.setattr(cuda_build, "compile_cubin", lambda *a, **k: seen.append(a) or real(*a, **k))
    return seen


@needs_nvrtc
def test_compiled_once_then_read(source, cache, compilations):
    first = cuda_build.cached_cubin(source, "sm_90a", ("VALUE=1",))
    assert cuda_build.cached_cubin(source, "sm_90a", ("VALUE=1",)) == first
    assert len(compilations) == 1 and len(list(cache.iterdir())) == 1


@needs_nvrtc
def test_key_holds_all_that_matters(source, cache, compilations):
    for arch, value in (("sm_90a", 1), ("sm_80", 1), ("sm_90a", 2)):
        cuda_build.cached_cubin(source, arch, (f"VALUE={value}",))
    source.write_text(TINY + "\n")
    cuda_build.cached_cubin(source, "sm_90a", ("VALUE=1",))
    assert len(compilations) == len(list(cache.iterdir())) == 4


@needs_nvrtc
def test_another_header_or_nvrtc_is_another_build(source, cache, compilations, monkeypatch, tmp_path):
    header = tmp_path / "stage" / "csrc" / "inside.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("#define VALUE 1\n")
    source.write_text('#include "inside.cuh"\n' + TINY)
    monkeypatch.setattr(cuda_build, "KERNELS", tmp_path)
    cuda_build.cached_cubin(source, "sm_90a")
    header.write_text("#define VALUE 2\n")
    cuda_build.cached_cubin(source, "sm_90a")
    monkeypatch.setattr(cuda_build, "nvrtc_version", lambda: "99.9")
    cuda_build.cached_cubin(source, "sm_90a")
    assert len(compilations) == len(list(cache.iterdir())) == 3


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"x" + b[41:]])
def test_damaged_entry_is_rebuilt(source, cache, compilations, damage):
    good = cuda_build.cached_cubin(source, "sm_90a", ("VALUE=1",))
    entry = next(cache.iterdir())
    entry.write_bytes(damage(entry.read_bytes()))
    assert cuda_build.cached_cubin(source, "sm_90a", ("VALUE=1",)) == good
    assert len(compilations) == 2
    assert cuda_build.cached_cubin(source, "sm_90a", ("VALUE=1",)) == good and len(compilations) == 2


@needs_nvrtc
def test_writers_at_once_leave_one_whole_entry(source, cache):
    results = []
    build = lambda: results.append(cuda_build.cached_cubin(source, "sm_90a", ("VALUE=1",)))  # noqa: E731
    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(results) == 4
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


@needs_nvrtc
def test_what_is_compiled_ahead_is_read_later(source, cache, compilations):
    wanted = [(source, "sm_90a", (f"VALUE={i}",)) for i in range(3)]
    seen = []
    cuda_build.compile_ahead(
        [*wanted, (source, "sm_90a", ())], lambda: seen.append(1)
    )  # the last has no VALUE
    assert len(seen) == len(compilations) == 4 and len(list(cache.iterdir())) == 3
    assert all(cuda_build.cached_cubin(*one) for one in wanted) and len(compilations) == 4


@needs_nvrtc
def test_whoever_cancels_leaves_no_compiler_running(monkeypatch, source):
    started, ended = [], []

    def build(*one):
        started.append(one)
        time.sleep(0.05)
        ended.append(one)

    def cancel():
        raise KeyError

    monkeypatch.setattr(cuda_build, "cached_cubin", build)
    with pytest.raises(KeyError):
        cuda_build.compile_ahead([(source, "sm_90a", (f"V={i}",)) for i in range(50)], cancel)
    assert sorted(started) == sorted(ended) and len(started) < 50


def test_i09_no_more_compilers_than_cores(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    for cores, expected in ((None, 1), (1, 1), (4, 4), (128, cuda_build.MOST_JOBS)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert cuda_build.jobs() == expected


def test_without_nvrtc_nothing_is_compiled_ahead(monkeypatch, source):
    monkeypatch.setattr(cuda_build, "why_no_build", lambda: "no NVRTC found")
    monkeypatch.setattr(cuda_build, "cached_cubin", lambda *one: pytest.fail("there is no compiler"))
    cuda_build.compile_ahead([(source, "sm_90a", ())])


@needs_nvrtc
def test_unwritable_cache_costs_only_time(source, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_build, "cache_folder", lambda: tmp_path / "missing" / "folder")
    assert cuda_build.cached_cubin(source, "sm_90a", ("VALUE=1",))


@pytest.mark.parametrize("made_before", [False, True])
def test_cache_moves_to_the_user_where_the_pack_is_read_only(monkeypatch, tmp_path, made_before):
    pack, real = tmp_path / "pack", tempfile.TemporaryFile
    if made_before:  # by somebody who could
        (pack / ".cache").mkdir(parents=True)
    else:
        pack.write_text("a file: nothing can be made below it")

    def in_folders_that_can_be_written(dir):
        if dir == pack / ".cache":
            raise PermissionError(dir)
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", in_folders_that_can_be_written)
    monkeypatch.setattr(cuda_build, "KERNELS", pack)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "user"))
    assert cuda_build.cache_folder.__wrapped__() == tmp_path / "user" / "comfyui-vc-attention"


@needs_nvrtc
def test_compiler_words_reach_the_user(source):
    source.write_text("extern int broken(")
    with pytest.raises(cuda_build.CudaBuildError, match=r"^tiny\.cu does not build for sm_90a.* error: "):
        cuda_build.compile_cubin(source, "sm_90a")


@needs_nvrtc
def test_a_card_that_this_nvrtc_does_not_know_is_said_on_the_first_line(source):
    with pytest.raises(
        cuda_build.CudaBuildError, match=r"^tiny\.cu does not build for sm_999 .*architecture"
    ):
        cuda_build.compile_cubin(source, "sm_999")


def test_unknown_header_is_named(source):
    source.write_text('#include "nowhere.cuh"\n')
    with pytest.raises(cuda_build.CudaBuildError, match=r"nowhere\.cuh"):
        cuda_build._headers(source)


def test_pack_is_a_c_struct():
    assert (
        cuda_build.pack("iPf", 1, None, 2.0).hex() == "01000000" + "00" * 4 + "00" * 8 + "00000040" + "00" * 4
    )


@pytest.mark.parametrize(
    ("name", "major"),
    [
        ("libnvrtc.so.13", 13),
        ("libnvrtc.so.12.8.93", 12),
        ("nvrtc64_120_0.dll", 12),
        ("nvrtc64_130_0.dll", 13),
    ],
)
def test_major_of_a_library(name, major, tmp_path):
    assert cuda_build._major(tmp_path / name) == major
