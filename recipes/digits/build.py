"""Rebuild everything in this folder that is not source: the images, and the base model that reads them.

    python recipes/digits/build.py digits.csv.gz    # about two minutes on one CPU core
    python recipes/digits/build.py                  # the model alone, from the data that is here

`digits.csv.gz` is the file of scikit-learn (`sklearn/datasets/data/`): 1,797 images of 8 × 8 pixels, 0 to 16 each, and their
digits. The base model is a LLaVA from scratch, a vision tower and a language model of two layers each, which supervised training
leaves half-way: it sees something of the images, and is right in about half of the cases.

One process, one thread, fixed seeds: the same machine and versions give the same bytes. Another CPU may round differently and
then gives other weights of the same quality.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

HERE = Path(__file__).resolve().parent
QUESTION = "Which digit is this?"
TEST_SHARE = 5  # every fifth image
SIDE, PATCH, BRIGHTEST = 8, 2, 16  # pixels, pixels, the largest value of a pixel
PLACE, END, TURN_START, TURN_END = "<image>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 300  # 256 bytes, 4 special tokens, the rest merges
HIDDEN = 64
SUPERVISED_STEPS = 150
SUPERVISED_BATCH = 32
LEARNING_RATE = 1e-3
IGNORED = -100  # the label that transformers' loss leaves out


# --- the data ---------------------------------------------------------------------------------------------------------


def png(pixels: list[int]) -> bytes:
    """An image of scikit-learn's as a PNG file, its 17 shades of grey spread over 256."""
    grey = np.array(pixels, dtype=np.float64).reshape(SIDE, SIDE) * 255 / BRIGHTEST
    buffer = io.BytesIO()
    Image.fromarray(grey.round().astype(np.uint8)).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def write_data(source: Path) -> None:
    """data/train.parquet and data/test.parquet: the columns `prompt`, `image` (as `datasets` stores images) and `answer`."""
    with gzip.open(source, "rt", encoding="ascii") as file:
        rows = [[int(float(cell)) for cell in line] for line in csv.reader(file)]
    (HERE / "data").mkdir(exist_ok=True)
    for name, chosen in {"train": lambda n: n % TEST_SHARE != 0, "test": lambda n: n % TEST_SHARE == 0}.items():
        part = [row for number, row in enumerate(rows) if chosen(number)]
        table = pa.table(
            {
                "prompt": [[{"role": "user", "content": QUESTION}] for _ in part],
                "image": [{"bytes": png(row[:-1]), "path": None} for row in part],
                "answer": [str(row[-1]) for row in part],
            }
        )
        pq.write_table(table, HERE / "data" / f"{name}.parquet", compression="zstd")


# --- the model --------------------------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges are those of the question; a digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, TURN_START, TURN_END, PLACE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"user\n{QUESTION}\nassistant\n"] * 10, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END, additional_special_tokens=[TURN_START, PLACE], model_max_length=128
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Sixteen placeholders an image, one for each patch of 2 × 2 pixels."""
    images = CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False, image_mean=[0.3] * 3, image_std=[0.35] * 3)
    return LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", image_token=PLACE, num_additional_image_tokens=1
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """0.2 million random parameters."""
    vision = CLIPVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text: dict[str, Any] = {
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(PLACE),
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config)


def read_split(name: str) -> tuple[list[Image.Image], list[str]]:
    """The images and answers of a split."""
    table = pq.read_table(HERE / "data" / f"{name}.parquet").to_pydict()
    return [Image.open(io.BytesIO(cell["bytes"])).convert("RGB") for cell in table["image"]], table["answer"]


def inputs_of(processor: LlavaProcessor, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """The prompts of images as the model takes them."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    made = processor(text=[text] * len(images), images=[[image] for image in images], return_tensors="pt", add_special_tokens=False)
    return {"input_ids": made["input_ids"], "pixel_values": made["pixel_values"]}


def teach(model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
    """Supervised training, stopped half-way."""
    images, answers = read_split("train")
    prompts = inputs_of(processor, images)
    tokenizer = processor.tokenizer
    endings = torch.tensor([[*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id] for answer in answers])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(SUPERVISED_STEPS):
        chosen = torch.randint(len(images), (SUPERVISED_BATCH,), generator=generator)
        ids = torch.cat([prompts["input_ids"][chosen], endings[chosen]], dim=1)
        labels = ids.clone()
        labels[:, : -endings.shape[1]] = IGNORED
        loss = model(input_ids=ids, pixel_values=prompts["pixel_values"][chosen], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def accuracy(model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> tuple[float, float]:
    """(greedy, sampled at temperature 1) on the test images."""
    images, answers = read_split("test")
    logits = model.eval()(**inputs_of(processor, images)).logits[:, -1]
    right = torch.tensor([processor.tokenizer.encode(answer, add_special_tokens=False)[0] for answer in answers])
    return (logits.argmax(-1) == right).float().mean().item(), logits.softmax(-1).gather(1, right[:, None]).mean().item()


def main() -> None:
    """Build what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("digits", nargs="?", type=Path, help="scikit-learn's digits.csv.gz; without it the data stay as they are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.digits is not None:
        write_data(arguments.digits)
    tokenizer = build_tokenizer()
    processor, model = build_processor(tokenizer), build_model(tokenizer)
    teach(model, processor)
    greedy, sampled = accuracy(model, processor)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; test accuracy {greedy:.3f} greedy, {sampled:.3f} sampled")
    folder = HERE / "model"
    shutil.rmtree(folder, ignore_errors=True)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
