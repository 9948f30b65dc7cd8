"""One of two processes that meet over gloo on 127.0.0.1 and run engines' attention with our adapters.

python ranks.py <folder> <rank> <engine> ...: leaves <engine><rank>.pt in the folder, which the tests read.
"""

import importlib.util
import os
import sys
import types
from collections import defaultdict
from pathlib import Path

os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[2]
RANKS, TOKENS, HEADS, D, CLUSTERS = 2, 720, 4, 64, 4  # six tiles are worth four clusters


def name_the_checkout():
    """tests/conftest.py gives the checkout its import name; a child process has to run it itself."""
    spec = importlib.util.spec_from_file_location("conftest", TESTS / "conftest.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def inputs():
    """q, k, v [1, H, L, D], the same on every rank; the key shards' means differ by about one deviation."""
    from comfyui_vc_attention.kernels.testing import sample_qkv

    q, k, v = sample_qkv("clustered", (1, HEADS, TOKENS, D))
    offset = torch.randn(1, HEADS, 1, D, generator=torch.Generator().manual_seed(1))
    k[:, :, TOKENS // 2 :] += offset
    return q, k, v


def attention(**changes):
    from comfyui_vc_attention.kernels import VCConfig
    from comfyui_vc_attention.kernels.parallel.sharded import ShardedAttention

    return ShardedAttention(VCConfig(clusters=CLUSTERS, **changes), kernel="reference")


def spoiled(sharded, change):
    """The same attention with a log-sum-exp that is wrong in one way, as kernels of others have been."""
    right = sharded.attend

    def attend(q, k, v, **options):
        out, lse = right(q, k, v, **options)
        if change == "base 2":
            return out, lse / torch.log(torch.tensor(2.0))
        return out, lse - D**-0.5 * (q @ k.mean(2, keepdim=True).transpose(-1, -2))[..., 0]

    sharded.attend = attend
    return sharded


class Yunchang:
    """LongContextAttention; tensors are [B, L, H, D]."""

    def degrees(self, ulysses, ring):
        from yunchang import set_seq_parallel_pg

        set_seq_parallel_pg(ulysses, ring, dist.get_rank(), RANKS)

    def layer(self, sharded):
        from comfyui_vc_attention.kernels.parallel.yunchang import attention_processor
        from yunchang import LongContextAttention

        return LongContextAttention(attn_type=None, attn_processor=attention_processor(sharded))

    def run(self, sharded, q, k, v):
        return self.layer(sharded)(*(x.transpose(1, 2).contiguous() for x in (q, k, v))).transpose(1, 2)


class XDiT:
    """USP() and the function table of the real xfuser, past its package inits, which refuse a CPU."""

    def __init__(self):
        root = Path(importlib.util.find_spec("xfuser").submodule_search_locations[0])
        for name in ("xfuser", "xfuser.core", "xfuser.core.distributed", "xfuser.model_executor",
                     "xfuser.model_executor.layers"):  # fmt: skip
            package = self.stand_in(name)
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        self.distributed = sys.modules["xfuser.core.distributed"]
        self.stand_in(
            "xfuser.envs",
            _is_npu=lambda: False,
            PACKAGES_CHECKER=types.SimpleNamespace(get_packages_info=lambda: defaultdict(bool)),
            environment_variables=defaultdict(lambda: lambda: None),
        )
        no_cache = types.SimpleNamespace(has_cache_entry=lambda layer: False)
        self.stand_in("xfuser.core.cache_manager.cache_manager", get_cache_manager=lambda: no_cache)
        unused = dict.fromkeys(("fp8_comms_input_all_to_all", "fp8_comms_output_all_to_all"))
        unused["fp8_attention_kwargs"] = lambda *args: {}
        unused["fp8_observe_output"] = lambda *args: None
        self.stand_in("xfuser.core.distributed.fp8_comms", **unused)
        config = types.SimpleNamespace(use_spargeattn_head_balance=False)
        state = types.SimpleNamespace(runtime_config=config, fp8_comms=None, attention_backend=None)
        self.distributed.get_runtime_state = lambda: state
        self.sizes = {}
        for which in ("sequence", "ulysses", "ring"):
            size = f"get_{which}_parallel_world_size"
            setattr(self.distributed, size, lambda which=which: self.sizes[which])
            rank = f"get_{which}_parallel_rank"
            setattr(self.distributed, rank, lambda which=which: dist.get_rank() % self.sizes[which])

    @staticmethod
    def stand_in(name, **content):
        module = sys.modules[name] = types.ModuleType(name)
        module.__dict__.update(content)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)
        return module

    def degrees(self, ulysses, ring):
        from yunchang import set_seq_parallel_pg
        from yunchang.globals import PROCESS_GROUP

        set_seq_parallel_pg(ulysses, ring, dist.get_rank(), RANKS)
        self.sizes.update(sequence=ulysses * ring, ulysses=ulysses, ring=ring)
        from xfuser.model_executor.layers import usp

        usp.PROCESS_GROUP = PROCESS_GROUP  # xfuser takes it only where there is a GPU
        self.usp = usp

    def run(self, sharded, q, k, v):
        from comfyui_vc_attention.kernels.parallel.xdit import register

        return self.usp.USP(q, k, v, backend=register(sharded))


class Diffusers:
    """diffusers' attention dispatch under context parallelism; tensors are [B, L, H, D]."""

    def degrees(self, ulysses, ring, **anything):
        from diffusers import ContextParallelConfig
        from diffusers.models._modeling_parallel import ParallelConfig

        context = ContextParallelConfig(ulysses_degree=ulysses, ring_degree=ring, **anything)
        mesh = dist.device_mesh.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        self.config = ParallelConfig(context_parallel_config=context)
        self.config.setup(dist.get_rank(), RANKS, torch.device("cpu"), mesh=mesh)

    def run(self, sharded, q, k, v):
        from comfyui_vc_attention.kernels.parallel.diffusers import attention_backend
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        with attention_backend(sharded) as declined:
            heads_last = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            out = dispatch_attention_fn(*heads_last, parallel_config=self.config)
        assert not declined
        return out.transpose(1, 2)

    def uneven(self):
        """diffusers' ways for head counts and lengths that the ranks do not divide: this rank's queries."""
        q, k, v = (x[:, :3, :-1] for x in inputs())
        half = TOKENS // 2
        shard = [x[:, :, :half] if dist.get_rank() == 0 else x[:, :, half:] for x in (q, k, v)]
        made = {}
        for case, degrees in (
            ("ulysses", {"ulysses": RANKS, "ring": 1, "ulysses_anything": True}),
            ("ring", {"ulysses": 1, "ring": RANKS, "ring_anything": True}),
        ):
            self.degrees(**degrees)
            sharded = attention()
            if case == "ulysses":
                sharded.begin_forward(step=0, grouped=True)
            made[f"uneven, {case}"] = self.run(sharded, *shard)
        return made

    def models(self):
        """Outputs of a whole tiny Wan transformer: alone, and split by diffusers' own context parallelism."""
        from comfyui_vc_attention.kernels.parallel.diffusers import attention_backend
        from diffusers import ContextParallelConfig, WanTransformer3DModel
        from diffusers.hooks import context_parallel

        context_parallel.logger.warning_once = print  # which the logger of 0.41.0 lacks
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it, also on a CPU
        generator = torch.Generator().manual_seed(1)
        latent = torch.randn(1, 4, 3, 20, 20, generator=generator)  # 300 tokens
        text = torch.randn(1, 6, 16, generator=generator)
        made = {}
        for name, degrees in (
            ("alone", {}),
            ("ulysses", {"ulysses_degree": 2}),
            ("ring", {"ring_degree": 2}),
        ):
            torch.manual_seed(0)
            model = WanTransformer3DModel(
                num_attention_heads=2, attention_head_dim=D, in_channels=4, out_channels=4,
                text_dim=16, ffn_dim=64, num_layers=2, rope_max_seq_len=32,
            ).eval()  # fmt: skip
            with attention_backend(attention()) as declined:
                if degrees:
                    model.enable_parallelism(config=ContextParallelConfig(**degrees))
                made[f"model, {name}"] = model(latent, torch.tensor([500.0]), text, return_dict=False)[0]
            made[f"model, {name}, declined"] = dict(declined)
        return made


ENGINES = {"yunchang": Yunchang, "xdit": XDiT, "diffusers": Diffusers}


def whole(shard):
    """This rank's query rows and the others', in order."""
    parts = [torch.empty_like(shard.contiguous()) for _ in range(RANKS)]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts, 2)


@torch.inference_mode()
def results(engine):
    """Outputs [1, H, L, D] of the whole sequence, by case, and this rank's token order under Ulysses."""
    rank, made = dist.get_rank(), {}
    rows = slice(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)
    shard = [x[:, :, rows].contiguous() for x in inputs()]
    engine.degrees(ulysses=RANKS, ring=1)
    grouped = attention()
    grouped.begin_forward(step=0, grouped=True)
    made["ulysses"] = whole(engine.run(grouped, *shard))
    ((_, grouping),) = grouped.groupings.values()
    made["order"] = grouping.order
    plain = attention()
    plain.begin_forward(step=5, grouped=False)
    made["ulysses after the window"] = whole(engine.run(plain, *shard))
    engine.degrees(ulysses=1, ring=RANKS)
    made["ring"] = whole(engine.run(attention(), *shard))
    in_window = attention()
    in_window.begin_forward(step=0, grouped=True)
    made["ring in the window"] = whole(engine.run(in_window, *shard))
    assert not in_window.groupings
    for change in ("base 2", "missing mean"):
        made[f"ring, {change}"] = whole(engine.run(spoiled(attention(), change), *shard))
    for more in ("uneven", "models"):
        if hasattr(engine, more):
            made |= getattr(engine, more)()
    return made


def main(folder, rank, *engines):
    name_the_checkout()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=RANKS)
    try:
        for engine in engines:
            torch.save(results(ENGINES[engine]()), Path(folder) / f"{engine}{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
