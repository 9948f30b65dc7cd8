"""Write the example workflows: python tests/workflows/build.py. Their nodes: tests/data/object_info.json."""

import json
from pathlib import Path

from graph import Graph

ROOT = Path(__file__).resolve().parents[2]
HUB = "https://huggingface.co/Comfy-Org"
SEED = 20260917
BAD = "blurry, static, distorted, low quality, subtitles"


def object_info() -> dict:
    return json.loads((ROOT / "tests" / "data" / "object_info.json").read_text())


def file(repository: str, folder: str, name: str, path: str = "split_files/") -> dict:
    """A model file as ComfyUI's page offers to download it."""
    return {
        "name": name,
        "directory": folder,
        "url": f"{HUB}/{repository}/resolve/main/{path}{folder}/{name}",
    }


WAN21, WAN22 = "Wan_2.1_ComfyUI_repackaged", "Wan_2.2_ComfyUI_Repackaged"
UMT5 = file(WAN21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
WAN_VAE = file(WAN22, "vae", "wan_2.1_vae.safetensors")


def note_of(workflow: str) -> str:
    """notes/<workflow>.md, with one line per paragraph as the page renders it."""
    text = (Path(__file__).parent / "notes" / f"{workflow}.md").read_text()
    return "\n\n".join(" ".join(part.split("\n")) for part in text.strip().split("\n\n"))


def wan_experts(g: Graph, kind: str):
    """Both experts of Wan 2.2, patched by one node: (high, low, the patch)."""
    names = [f"wan2.2_{kind}_{noise}_noise_14B_fp8_scaled.safetensors" for noise in ("high", "low")]
    loaders = [
        g.add(
            "UNETLoader",
            (0, 330 * number),
            title=title,
            size=(360, 90),
            unet_name=name,
            models=[file(WAN22, "diffusion_models", name)],
        )
        for number, (name, title) in enumerate(
            zip(names, ("High-noise expert", "Low-noise expert"), strict=True)
        )
    ]
    patch = g.add(
        "VCAttentionPatch", (420, 0), size=(320, 420), model=loaders[0]["MODEL"], model_2=loaders[1]["MODEL"]
    )
    high, low = (
        g.add("ModelSamplingSD3", (800, 150 * slot), size=(260, 70), shift=5.0, model=patch[slot])
        for slot in (0, 1)
    )
    return high, low, patch


def prompts(g: Graph, clip, positive: str, negative: str = BAD, y: int = 520):
    """Two prompts under the patch node: the conditioning of each."""
    for number, (title, text) in enumerate((("Prompt", positive), ("Negative prompt", negative))):
        place = (420, y + 230 * number)
        text = g.add("CLIPTextEncode", place, title=title, size=(380, 180), text=text, clip=clip["CLIP"])
        yield text["CONDITIONING"]


def wan_text(g: Graph, positive: str):
    clip = g.add("CLIPLoader", (0, 660), size=(360, 120), clip_name=UMT5["name"], type="wan", models=[UMT5])
    vae = g.add("VAELoader", (0, 850), size=(360, 70), vae_name=WAN_VAE["name"], models=[WAN_VAE])
    return vae, *prompts(g, clip, positive)


def wan_sampling(g: Graph, high, low, positive, negative, latent, x: int):
    """20 steps, the first 10 on the high-noise expert: its grouping window lies there."""
    shared = {"steps": 20, "cfg": 3.5, "sampler_name": "euler", "scheduler": "simple"}
    conditions = {"positive": positive, "negative": negative}
    first = g.add(
        "KSamplerAdvanced",
        (x, 0),
        title="Steps 1 to 10",
        size=(300, 340),
        model=high["MODEL"],
        noise_seed=SEED,
        end_at_step=10,
        return_with_leftover_noise="enable",
        latent_image=latent,
        **shared,
        **conditions,
    )
    return g.add(
        "KSamplerAdvanced",
        (x, 400),
        title="Steps 11 to 20",
        size=(300, 340),
        model=low["MODEL"],
        add_noise="disable",
        noise_seed=0,
        start_at_step=10,
        end_at_step=10000,
        latent_image=first["LATENT"],
        **shared,
        **conditions,
    )


def finish(g: Graph, samples, vae, patch, x: int, prefix: str, fps: float = 16.0, audio=None, second=True):
    pictures = g.add("VAEDecode", (x, 0), size=(260, 70), samples=samples, vae=vae)
    sound = {"audio": audio} if audio else {}
    video = g.add("CreateVideo", (x, 130), size=(260, 110), images=pictures["IMAGE"], fps=fps, **sound)
    g.add("SaveVideo", (x + 310, 0), size=(420, 420), video=video["VIDEO"], filename_prefix=f"video/{prefix}")
    experts = {"model": patch[0], **({"model_2": patch[1]} if second else {})}
    g.add("VCAttentionReport", (x + 310, 480), size=(420, 420), after=samples, **experts)


def wan22_t2v_14b(info: dict) -> dict:
    g = Graph(info)
    high, low, patch = wan_experts(g, "t2v")
    vae, positive, negative = wan_text(
        g,
        "A lighthouse keeper climbs a spiral stair at dusk, lantern swinging, long shadows turning on the "
        "wall, the camera follows from below, film grain",
    )
    latent = g.add("EmptyHunyuanLatentVideo", (850, 520), size=(260, 150), width=1280, height=720, length=81)
    last = wan_sampling(g, high, low, positive, negative, latent["LATENT"], 1160)
    finish(g, last["LATENT"], vae["VAE"], patch, 1510, "wan22_t2v_vc_attention")
    g.note(note_of("wan22_t2v_14b"), (0, -350), (740, 280))
    return g.to_json()


def wan22_i2v_14b(info: dict) -> dict:
    g = Graph(info)
    high, low, patch = wan_experts(g, "i2v")
    vae, positive, negative = wan_text(
        g, "The camera slowly moves closer, a light wind moves hair and cloth, natural motion, soft daylight"
    )
    image = g.add("LoadImage", (0, 980), size=(360, 320), image="example.png")
    start = g.add(
        "WanImageToVideo",
        (850, 520),
        size=(280, 210),
        width=832,
        height=480,
        length=81,
        positive=positive,
        negative=negative,
        vae=vae["VAE"],
        start_image=image["IMAGE"],
    )
    last = wan_sampling(g, high, low, start["positive"], start["negative"], start["latent"], 1180)
    finish(g, last["LATENT"], vae["VAE"], patch, 1530, "wan22_i2v_vc_attention")
    g.note(note_of("wan22_i2v_14b"), (0, -350), (740, 280))
    return g.to_json()


def hunyuan_video_15_t2v(info: dict) -> dict:
    hub = "HunyuanVideo_1.5_repackaged"
    model = file(hub, "diffusion_models", "hunyuanvideo1.5_720p_t2v_fp16.safetensors")
    encoders = [
        file(hub, "text_encoders", name)
        for name in ("qwen_2.5_vl_7b_fp8_scaled.safetensors", "byt5_small_glyphxl_fp16.safetensors")
    ]
    decoder = file(hub, "vae", "hunyuanvideo15_vae_fp16.safetensors")
    g = Graph(info)
    loader = g.add("UNETLoader", (0, 0), size=(360, 90), unet_name=model["name"], models=[model])
    clip = g.add(
        "DualCLIPLoader",
        (0, 150),
        size=(360, 140),
        clip_name1=encoders[0]["name"],
        clip_name2=encoders[1]["name"],
        type="hunyuan_video_15",
        models=encoders,
    )
    vae = g.add("VAELoader", (0, 350), size=(360, 70), vae_name=decoder["name"], models=[decoder])
    patch = g.add("VCAttentionPatch", (420, 0), size=(320, 420), model=loader["MODEL"])
    prompt = (
        "A paper boat follows a rain gutter through an old town, past doors and bicycles, close to the water"
    )
    positive, negative = prompts(g, clip, prompt, "")
    sampling = g.add("ModelSamplingSD3", (800, 0), size=(260, 70), shift=7.0, model=patch[0])
    guider = g.add(
        "CFGGuider",
        (800, 130),
        size=(260, 110),
        model=sampling["MODEL"],
        cfg=6.0,
        positive=positive,
        negative=negative,
    )
    sigmas = g.add(
        "BasicScheduler", (800, 300), size=(260, 120), model=patch[0], scheduler="simple", steps=20
    )
    sampler = g.add("KSamplerSelect", (850, 520), size=(260, 70), sampler_name="euler")
    noise = g.add("RandomNoise", (850, 650), size=(260, 90), noise_seed=SEED)
    latent = g.add(
        "EmptyHunyuanVideo15Latent", (850, 800), size=(260, 150), width=1280, height=720, length=121
    )
    last = g.add(
        "SamplerCustomAdvanced",
        (1160, 0),
        size=(280, 140),
        noise=noise["NOISE"],
        guider=guider["GUIDER"],
        sampler=sampler["SAMPLER"],
        sigmas=sigmas["SIGMAS"],
        latent_image=latent["LATENT"],
    )
    finish(g, last["output"], vae["VAE"], patch, 1490, "hunyuan15_t2v_vc_attention", 24.0, second=False)
    g.note(note_of("hunyuan_video_15_t2v"), (0, -350), (740, 280))
    return g.to_json()


def minimax_h3_t2v(info: dict) -> dict:
    def h3(folder, name):
        return file("MiniMax-H3", folder, name, "")

    model = h3("diffusion_models", "minimax_h3_fl2va_pruned_int8_convrot.safetensors")
    encoder = h3("text_encoders", "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors")
    decoders = [h3("vae", f"minimax_h3_{what}.safetensors") for what in ("video_vae_fp16", "audio_vae_fp32")]
    g = Graph(info)
    loader = g.add("UNETLoader", (0, 0), size=(360, 90), unet_name=model["name"], models=[model])
    clip = g.add(
        "CLIPLoader", (0, 150), size=(360, 120), clip_name=encoder["name"], type="minimax", models=[encoder]
    )
    video_vae, audio_vae = (
        g.add(
            "VAELoader",
            (0, 330 + 130 * i),
            title=title,
            size=(360, 70),
            vae_name=decoder["name"],
            models=[decoder],
        )
        for i, (title, decoder) in enumerate(zip(("Video VAE", "Audio VAE"), decoders, strict=True))
    )
    patch = g.add("VCAttentionPatch", (420, 0), size=(320, 420), model=loader["MODEL"])
    start = g.add(
        "MiniMaxH3ImageToVideo",
        (420, 520),
        size=(380, 330),
        clip=clip["CLIP"],
        vae=video_vae["VAE"],
        width=1344,
        height=768,
        length=124,
        prompt="A street violinist plays under an arcade while rain falls outside, warm light, slow "
        "camera, the sound of violin and rain",
    )
    guider = g.add("BasicGuider", (800, 0), size=(260, 70), model=patch[0], conditioning=start["positive"])
    sigmas = g.add(
        "BasicScheduler", (800, 130), size=(260, 120), model=patch[0], scheduler="simple", steps=20
    )
    sampler = g.add("KSamplerSelect", (800, 310), size=(260, 70), sampler_name="res_multistep")
    noise = g.add("RandomNoise", (850, 520), size=(260, 90), noise_seed=SEED)
    last = g.add(
        "SamplerCustomAdvanced",
        (1160, 0),
        size=(280, 140),
        noise=noise["NOISE"],
        guider=guider["GUIDER"],
        sampler=sampler["SAMPLER"],
        sigmas=sigmas["SIGMAS"],
        latent_image=start["LATENT"],
    )
    sound = g.add("VAEDecodeAudio", (1160, 200), size=(280, 70), samples=last["output"], vae=audio_vae["VAE"])
    finish(
        g, last["output"], video_vae["VAE"], patch, 1490, "h3_t2v_vc_attention", 24.0, sound["AUDIO"], False
    )
    g.note(note_of("minimax_h3_t2v"), (0, -350), (740, 280))
    return g.to_json()


def compare_sample(info: dict) -> dict:
    g = Graph(info)
    model = g.add("VCAttentionSample", (0, 0), size=(300, 150), prompt="a red circle")
    patch = g.add(
        "VCAttentionPatch",
        (360, 330),
        size=(320, 420),
        model=model["MODEL"],
        min_tokens=1,
        clusters=16,
        kernel="reference",
    )
    clips = []
    for title, source, y in (("A: exact", model["MODEL"], 0), ("B: VC-Attention", patch[0], 330)):
        last = g.add(
            "KSampler",
            (740, y),
            title=title,
            size=(300, 280),
            model=source,
            seed=7,
            steps=10,  # with guidance 2 the model shows what the prompt says: 62 of 64 clips
            cfg=2.0,
            sampler_name="euler",
            scheduler="simple",
            positive=model["positive"],
            negative=model["negative"],
            latent_image=model["LATENT"],
        )
        clips.append(
            (last, g.add("VCAttentionSampleDecode", (1090, y), size=(260, 90), latent=last["LATENT"]))
        )
    (_, first), (last, second) = clips
    g.add(
        "VCAttentionCompare",
        (1400, 0),
        size=(640, 760),
        images_a=first["IMAGE"],
        images_b=second["IMAGE"],
        model_b=patch[0],
    )
    g.add("VCAttentionReport", (2090, 0), size=(640, 620), model=patch[0], after=last["LATENT"])
    g.note(note_of("compare_sample"), (0, -380), (680, 320))
    return g.to_json()


def longcat_t2v_wanvideowrapper(info: dict) -> dict:
    """LongCat-Video has no loader of ComfyUI's own; these nodes are WanVideoWrapper's."""
    g = Graph(info)
    loader = g.add(
        "WanVideoModelLoader", (0, 0), size=(360, 440), model="LongCat_TI2V_comfy_bf16.safetensors"
    )
    vae = g.add("WanVideoVAELoader", (0, 500), size=(360, 190), model_name=WAN_VAE["name"])
    clip = g.add("CLIPLoader", (0, 750), size=(360, 120), clip_name=UMT5["name"], type="wan", models=[UMT5])
    patch = g.add("VCAttentionPatchWanVideo", (420, 0), size=(340, 400), model=loader["model"])
    prompt = (
        "A tram climbs a steep street in morning fog, its lamp glowing, people step aside, camera follows"
    )
    positive, negative = prompts(g, clip, prompt, y=500)
    bridge = g.add(
        "WanVideoTextEmbedBridge",
        (420, 960),
        size=(380, 80),
        positive=positive,
        negative=negative,
    )
    empty = g.add("WanVideoEmptyEmbeds", (420, 1100), size=(380, 170), num_frames=93)
    sampler = g.add(
        "WanVideoSampler",
        (850, 0),
        size=(340, 960),
        model=patch["model"],
        image_embeds=empty["image_embeds"],
        text_embeds=bridge["text_embeds"],
        **{"steps": 50, "cfg": 4.0, "shift": 12.0, "seed": SEED, "scheduler": "euler"},
    )
    pictures = g.add("WanVideoDecode", (1250, 0), size=(320, 290), vae=vae["vae"], samples=sampler["samples"])
    video = g.add("CreateVideo", (1250, 350), size=(320, 110), images=pictures["images"], fps=15.0)
    g.add(
        "SaveVideo",
        (1630, 0),
        size=(420, 420),
        video=video["VIDEO"],
        filename_prefix="video/longcat_t2v_vc_attention",
    )
    g.add("VCAttentionReport", (1630, 480), size=(420, 420), model=patch["model"], after=sampler["samples"])
    g.note(note_of("longcat_t2v_wanvideowrapper"), (0, -350), (740, 280))
    return g.to_json()


WORKFLOWS = (
    longcat_t2v_wanvideowrapper,
    wan22_t2v_14b,
    wan22_i2v_14b,
    hunyuan_video_15_t2v,
    minimax_h3_t2v,
    compare_sample,
)


def text_of(workflow: dict) -> str:
    return json.dumps(workflow, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    info = object_info()
    for build in WORKFLOWS:
        (ROOT / "workflows" / f"{build.__name__}.json").write_text(text_of(build(info)))


if __name__ == "__main__":
    main()
