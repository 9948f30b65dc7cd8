"""Attachments to hosts other than ComfyUI. Each file knows one host and nothing of the others."""
