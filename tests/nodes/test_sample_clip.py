"""The sample model's prompts, embeddings and latent map (how well it carries clips: tests/sample_model)."""

import pytest
import torch
from comfyui_vc_attention.nodes.sample_clip import (
    CHANNEL_MEAN,
    CHANNEL_STD,
    COEFFICIENTS,
    LATENT_CHANNELS,
    PROMPTS,
    TEXT_DIM,
    TEXT_TOKENS,
    decode_latent,
    encode_frames,
    patch_basis,
    prompt_embedding,
)


def test_a_word_is_one_token_and_the_rest_is_zero():
    embedding = prompt_embedding("a red circle")
    assert embedding.shape == (1, TEXT_TOKENS, TEXT_DIM)
    assert embedding[0, :3].abs().eq(1.0).all()
    assert not embedding[0, 3:].any()


def test_embeddings_are_the_same_on_every_machine():
    signs = "".join("+" if x > 0 else "-" for x in prompt_embedding("red")[0, 0, :24])
    assert signs == "---+--+-+-++--+----+++--"


def test_words_differ():
    words = torch.cat(
        [prompt_embedding(word)[0, :1] for word in sorted({w for p in PROMPTS for w in p.split()})]
    )
    overlap = words @ words.T / TEXT_DIM - torch.eye(len(words))
    assert overlap.abs().max() < 0.1


def test_the_empty_prompt_is_zero():
    assert not prompt_embedding("").any()


def test_a_long_prompt_is_refused():
    with pytest.raises(ValueError, match="at most 8 words, got 9"):
        prompt_embedding("a b c d e f g h i")


def test_basis_is_orthonormal():
    basis = patch_basis()
    assert len(COEFFICIENTS) == len(CHANNEL_MEAN) == len(CHANNEL_STD) == LATENT_CHANNELS
    torch.testing.assert_close(basis @ basis.T, torch.eye(LATENT_CHANNELS), atol=1e-6, rtol=0.0)


def test_latents_survive_the_way_to_frames_and_back():
    latent = 0.1 * torch.randn(2, 16, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    frames = decode_latent(latent)
    assert frames.shape == (2, 3, 16, 24, 3)
    torch.testing.assert_close(encode_frames(frames), latent, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("shape", [(1, 48, 3, 4, 4), (16, 3, 4, 4)])
def test_foreign_latents_are_refused(shape):
    with pytest.raises(ValueError, match=r"latent is \[B, 16, T, h, w\], got"):
        decode_latent(torch.zeros(shape))


def test_odd_frames_are_refused():
    with pytest.raises(ValueError, match="multiples of 4, got 10 x 12"):
        encode_frames(torch.zeros(1, 2, 10, 12, 3))
