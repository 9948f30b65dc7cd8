"""ComfyUI entry point. Importing this file loads nothing; ComfyUI calls comfy_entrypoint()."""

import logging

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """The pack's ComfyExtension; its node list is in nodes/extension.py."""
    try:
        from .nodes.extension import VCAttentionExtension
    except Exception:
        # ComfyUI logs only str(error) for a failing entry point; keep the traceback.
        logging.getLogger("vc_attention").exception("ComfyUI-VC-Attention could not be loaded")
        raise
    return VCAttentionExtension()
