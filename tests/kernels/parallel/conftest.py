"""Two processes that run every installed engine, started once and asked by several tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens, vc_attention
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2

RANKS = Path(__file__).with_name("ranks.py")
NEEDED = {"yunchang": ("yunchang",), "xdit": ("xfuser", "yunchang"), "diffusers": ("diffusers",)}


class Outcome:
    """What both ranks returned for every case of ranks.py, and the truth to compare with."""

    def __init__(self, ranks, by_rank):
        self.by_rank, self.config = by_rank, VCConfig(clusters=ranks.CLUSTERS)
        self.inputs = ranks.inputs()
        self.exact = exact_attention(*self.inputs)[0]
        self.grouping = group_tokens(self.inputs[2], self.config.clusters_for(ranks.TOKENS))

    def one_process(self, **options):
        """The same attention in this process."""
        config = options.pop("config", self.config)
        return vc_attention(*self.inputs, config, kernel="reference", **options)

    def output(self, case):
        first, second = (result[case] for result in self.by_rank)
        assert first.equal(second)
        return first

    def error(self, case):
        return relative_l2(self.output(case), self.exact)


@pytest.fixture(scope="session")
def ranks():
    """ranks.py as a module, for its sizes and inputs."""
    spec = importlib.util.spec_from_file_location("ranks", RANKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the two processes left what every installed engine gave."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(folder), str(rank), *filter(installed, NEEDED)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return folder


def installed(engine):
    return all(importlib.util.find_spec(package) for package in NEEDED[engine])


@pytest.fixture(scope="session", params=list(NEEDED))
def outcome(request, ranks):
    """Each engine's Outcome; skips where the engine is not installed."""
    if not installed(request.param):
        pytest.skip(f"needs {' and '.join(NEEDED[request.param])} (pip install --no-deps)")
    folder = request.getfixturevalue("folder")
    return Outcome(ranks, [torch.load(folder / f"{request.param}{rank}.pt") for rank in range(2)])
