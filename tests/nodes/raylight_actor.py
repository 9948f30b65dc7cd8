"""A Raylight worker for a real Ray actor. Ray sends the class itself: a worker cannot import this file."""

import importlib.util
import os
import sys


class RayWorker:
    """As much of Raylight's worker as nodes and a sampler use, inside a real Ray actor, under Ulysses."""

    def __init__(self, tests, rank, store):
        """tests: the folder of this file. store: a file in which the ranks find each other."""
        import torch.distributed as dist

        self.stand_ins, raylight = (
            self.load(f"{tests}/{name}.py") for name in ("conftest", "raylight_stand_in")
        )
        self.attention = raylight.UlyssesAttention(raylight.add_slot())
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        self.model = None

    @staticmethod
    def load(path):
        name = os.path.basename(path)[:-3]
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def load_unet(self, module, name):
        self.model = self.stand_ins.FakeModel(module, name)

    def get_parallel_dict(self):
        return {"ulysses_degree": 2, "ring_degree": 1, "cfg_degree": 1}

    def model_function_runner(self, function):
        self.model = function(self.model)

    def model_function_runner_get_values(self, function):
        return function(self.model)

    def break_kernel(self):
        """Every call of the kernel raises in this worker from now on."""

        def fail(operands):
            raise RuntimeError("no image for this card")

        for name, module in list(sys.modules.items()):
            if name.endswith(".nodes.model_patch"):
                module.attend_call = fail

    def sample(self, q, k, v):
        """Two steps of a model with two blocks. Returns this rank's tokens of every call, and dense calls."""
        before = self.attention.dense_calls
        outs = self.model.sample(
            [1.0, 0.5, 0.0],
            lambda options: [self.attention(q, k, v, options) for _ in range(2)],
            conditions=(((0,), 40),),
        )
        return [out for step in outs for out in step], self.attention.dense_calls - before
