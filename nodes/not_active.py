"""Why a model that went through a patch node carries no patch, kept on the model for the nodes behind it."""

# in a model's options, where ComfyUI reads nothing and clones carry it along
REASON = "vc_attention_not_active"


def with_reason(clone, reason: str):
    """The clone of a model, marked; nothing else about it changes."""
    clone.model_options[REASON] = reason
    return clone


def why_not_active(model) -> str | None:
    """What the last patch node in front of this model said, if it patched nothing; else None."""
    return model.model_options.get(REASON)
