"""The one list of nodes."""

from comfy_api.latest import ComfyExtension

from .benchmark_node import VCAttentionBenchmark
from .capture_node import VCAttentionCapture
from .compare_node import VCAttentionCompare
from .patch_node import VCAttentionPatch
from .raylight_node import VCAttentionPatchRaylight, VCAttentionReportRaylight
from .report_node import VCAttentionReport
from .sample_nodes import VCAttentionSample, VCAttentionSampleDecode
from .wan_video_node import VCAttentionPatchWanVideo

NODES = (
    VCAttentionPatch,
    VCAttentionReport,
    VCAttentionCompare,
    VCAttentionBenchmark,
    VCAttentionCapture,
    VCAttentionSample,
    VCAttentionSampleDecode,
    VCAttentionPatchRaylight,
    VCAttentionReportRaylight,
    VCAttentionPatchWanVideo,
)


class VCAttentionExtension(ComfyExtension):
    """What ComfyUI asks for this pack's nodes."""

    async def get_node_list(self):
        return list(NODES)
