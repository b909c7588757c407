"""Tiny random vision-language models with their real processors, saved as folders that transformers loads; no downloads, no torchvision."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3Processor,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny import PAD, VOCAB, _common, byte_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPREAD = 6.0
"""Widens the random weights, so that images matter and logits are peaked."""


def png(seed: int, size: tuple[int, int] = (8, 8)) -> bytes:
    """A PNG file of random colours; `size` is (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _tokenizer(places: list[str], place: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *places]})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("PLACE", place)
    return tokenizer


def _text(vocab: int, kind: str, **more) -> dict:
    return {**_common(VOCAB), "vocab_size": vocab, "model_type": kind, **more}


def _save(folder: Path, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(SPREAD)
    model.save_pretrained(folder)
    return model.eval()


def llava(folder: Path, seed: int = 0) -> PreTrainedModel:
    """CLIP's vision tower before a Qwen2: four placeholders an image, positions 0, 1, 2, …"""
    tokenizer = _tokenizer(["<image>"], "<image>")
    images = CLIPImageProcessorPil(size={"height": 8, "width": 8}, crop_size={"height": 8, "width": 8})
    LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", image_token="<image>", num_additional_image_tokens=1
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4)
    config = LlavaConfig(
        vision_config=vision,
        text_config=_text(len(tokenizer), "qwen2"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        tie_word_embeddings=False,
        pad_token_id=PAD,
    )
    return _save(folder, config, seed)


def idefics3(folder: Path, seed: int = 0) -> PreTrainedModel:
    """SmolVLM's kind: an image is cut into tiles, and rows of fewer tiles are padded with empty ones."""
    tokenizer = _tokenizer(["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"], "<image>")
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=True)
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = Idefics3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        text_config=_text(len(tokenizer), "llama"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=PAD,
    )
    return _save(folder, config, seed)


def qwen2_vl(folder: Path, seed: int = 0) -> PreTrainedModel:
    """Images of any size, positions in three dimensions (M-RoPE)."""
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(names, "<|vision_start|><|image_pad|><|vision_end|>")
    folder.mkdir(parents=True, exist_ok=True)
    Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        text_config=_text(len(tokenizer), "qwen2_vl_text", rope_parameters=rope),
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    return _save(folder, config, seed)


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {"llava": llava, "idefics3": idefics3, "qwen2_vl": qwen2_vl}
"""Every builder by name, for parametrized tests; each fills a folder and returns the model in eval mode."""


def write_rows(path: Path, rows: list[dict]) -> Path:
    """A .jsonl file of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
