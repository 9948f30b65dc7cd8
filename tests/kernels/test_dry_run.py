"""What a kernel costs on a card that is not here."""

import pytest
from comfyui_vc_attention.kernels import cuda_builds, dry_run
from comfyui_vc_attention.kernels.attend.cuda_build import CudaBuildError, compile_cubin, why_no_build
from comfyui_vc_attention.kernels.cubin import resources


@pytest.mark.skipif(why_no_build() is not None, reason=str(why_no_build()))
def test_every_function_of_every_build_is_counted(monkeypatch):
    two = cuda_builds.builds((8, 6), "cuda_int8_int8")[:2]
    monkeypatch.setattr(cuda_builds, "builds", lambda *a: two)
    used = dry_run.compiled("cuda_int8_int8", (8, 6))
    cubins = [compile_cubin(one.source, one.arch, one.defines)[0] for one in two]
    assert len(used) == sum(len(resources(cubin)) for cubin in cubins) > 2
    assert all(one.registers > 0 for one in used)


def test_what_the_compiler_raises_goes_to_the_caller(monkeypatch):
    def fails(*one):
        raise CudaBuildError("a.cu does not build")

    dry_run._cubin.cache_clear()
    monkeypatch.setattr(dry_run, "why_no_build", lambda: None)
    monkeypatch.setattr(dry_run, "compile_cubin", fails)
    with pytest.raises(CudaBuildError, match=r"a\.cu does not build"):
        dry_run.compiled("cuda_x", (9, 0))
