"""Everything that knows ComfyUI. The list of nodes is in extension.py; importing this file loads nothing."""
