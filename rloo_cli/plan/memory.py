"""How much memory a run needs, by term, from the model's configuration alone.

The peak is what stands all the time, plus the larger of what the two halves of a step add:

    standing   weights, optimizer state, decode copy, reference, the libraries' own
    rollout    KV cache of the rows that decode
    update     gradients, activations of a micro-batch, logits of a chunk

Bytes throughout. A formula, not a measurement: a test holds it within 30 % of measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rloo_cli.data.model_folder import model_errors, reason_of
from rloo_cli.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLOAT32, BFLOAT16 = 4, 2
ALLOCATOR_SLACK = 0.1
"""Share of the live tensors that the allocator holds beyond them (measured on CPUs: 0 to 0.2)."""
RUNTIME = 150 << 20
"""What the libraries take when they are first used: code pages, kernels' caches, buffers (measured: 115 to 155 MiB)."""
VLLM_ROWS = 64
"""Rows whose keys and values vLLM has room for on a CPU (rollout/vllm_build.py)."""
SOFTMAX_SLICE = 128
"""Positions whose softmax is taken at once (training/logprobs.py)."""
OPTIMIZER_STATES = {"adamw_torch": 2, "adamw_torch_fused": 2, "sgd": 0, "adagrad": 1, "rmsprop": 1, "adafactor": 0}
"""Numbers kept for each parameter; adafactor keeps a row and a column of each matrix, next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that memory depends on. Example: SmolLM2-135M has 134.5 M parameters, 30 layers of 576, 3 KV heads of 64."""

    parameters: int
    """Tied embeddings counted once."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    embedding_parameters: int
    """Those of the input and output embeddings, which are kept in float32 in a reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step does with the model."""

    weight_bytes: int
    """Bytes of a trained parameter: 4, or 2 without master weights."""
    low_precision: bool
    """Whether training autocasts to bfloat16 and decodes with a bfloat16 copy."""
    has_reference: bool
    checkpointing: bool
    optim: str
    micro_batch_tokens: int
    """Tokens that go through the model in one forward pass."""
    micro_batch_completion_tokens: int
    """Of these, the positions that go through the LM head."""
    head_chunk: int | None
    """Positions at once through the LM head; None = all, kept."""
    decode_rows: int
    decode_prompts: int
    prompt_tokens: int
    """Of one prompt."""
    completion_tokens: int
    """Of one completion, at most."""
    sampler: Literal["transformers", "vllm", "elsewhere"] = "transformers"
    """What samples on this device."""
    vllm_share: int = 0
    """Bytes of a GPU that vLLM takes for itself whatever it needs; 0 = by what it needs, as on a CPU."""


def estimate_memory(shape: ModelShape, work: Workload) -> dict[str, int]:
    """Bytes of each term, in the order in which `plan` prints them, and `peak`."""
    n = shape.parameters
    terms = {
        "weights": n * work.weight_bytes,
        "optimizer": n * FLOAT32 * OPTIMIZER_STATES[work.optim],
        "decode copy": n * BFLOAT16 if work.low_precision and work.sampler == "transformers" else 0,
        "vllm": _vllm(shape, work) if work.sampler == "vllm" else 0,
        "reference": _reference(shape, work),
        "kv cache": _kv_cache(shape, work) if work.sampler == "transformers" else 0,
        "gradients": n * work.weight_bytes,
        "activations": _activations(shape, work),
        "logits": _logits(shape, work),
    }
    standing = sum(terms[name] for name in ("weights", "optimizer", "decode copy", "vllm", "reference"))
    update = sum(terms[name] for name in ("gradients", "activations", "logits"))
    live = standing + max(terms["kv cache"], update)
    terms |= {"allocator": round(ALLOCATOR_SLACK * live), "runtime": RUNTIME}
    return {**terms, "peak": live + terms["allocator"] + terms["runtime"]}


def _reference(shape: ModelShape, work: Workload) -> int:
    if not work.has_reference:
        return 0
    if not work.low_precision:
        return shape.parameters * work.weight_bytes
    linear = shape.parameters - shape.embedding_parameters
    return linear * BFLOAT16 + shape.embedding_parameters * work.weight_bytes


def _vllm(shape: ModelShape, work: Workload) -> int:
    """A GPU's share; on a CPU its weights, which it holds twice (plain, and as its kernels want them), and keys and values of some rows."""
    if work.vllm_share:
        return work.vllm_share
    number = BFLOAT16 if work.low_precision else FLOAT32
    positions = VLLM_ROWS * (work.prompt_tokens + work.completion_tokens)
    return number * (2 * shape.parameters + positions * shape.layers * 2 * shape.kv_heads * shape.head_dim)


def _kv_cache(shape: ModelShape, work: Workload) -> int:
    positions = work.decode_prompts * work.prompt_tokens + work.decode_rows * work.completion_tokens
    number = BFLOAT16 if work.low_precision else FLOAT32
    return positions * shape.layers * 2 * shape.kv_heads * shape.head_dim * number


def _activations(shape: ModelShape, work: Workload) -> int:
    """What the backward pass needs of the layers, and the weights that autocast keeps in its own dtype meanwhile.

    With checkpointing each layer keeps its input and one layer at a time is whole; without, all are.
    """
    number = BFLOAT16 if work.low_precision else FLOAT32
    q_and_kv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # float32: two norms' inputs and outputs, two residual sums; in the products' dtype: q, k, v, attention out, gate, up, act, their product.
    layer = 4 * shape.hidden * FLOAT32 + (2 * shape.hidden + 2 * q_and_kv + 4 * shape.intermediate) * number
    kept = shape.layers * shape.hidden * FLOAT32 + layer if work.checkpointing else shape.layers * layer
    cast_weights = (shape.parameters - shape.embedding_parameters) * BFLOAT16 if work.low_precision else 0
    return work.micro_batch_tokens * kept + cast_weights


def _logits(shape: ModelShape, work: Workload) -> int:
    """The logits of a chunk, which become their own gradient in place, and the gradient of the head's weight while it is summed up.

    Softmax goes through them a slice at a time. While the reference is scored, the policy's own logits wait for their backward pass.
    """
    positions = work.micro_batch_completion_tokens
    chunk = positions if work.head_chunk is None else min(work.head_chunk, positions)
    waiting = positions if work.has_reference and work.head_chunk is None else 0
    number = BFLOAT16 if work.low_precision else FLOAT32
    softmax = 3 * SOFTMAX_SLICE * shape.vocab * FLOAT32
    head_gradient = shape.vocab * shape.hidden * (work.weight_bytes + (BFLOAT16 if work.low_precision else 0))
    return (chunk + waiting) * shape.vocab * number + softmax + head_gradient


def estimate_disk(shape: ModelShape, work: Workload, *, checkpoints: int, rows: int) -> Mapping[str, int]:
    """Bytes of one checkpoint, of all that are kept, of `final/` and of the rollouts' parquet files (rows = completions of the run)."""
    checkpoint = shape.parameters * (work.weight_bytes + FLOAT32 * OPTIMIZER_STATES[work.optim])
    text_and_ids = work.completion_tokens * (4 + 4 + 4)  # text, id and log-prob of a token; parquet's compression is left out
    return {
        "checkpoint": checkpoint,
        "checkpoints": checkpoint * checkpoints,
        "final": shape.parameters * work.weight_bytes,
        "rollouts": rows * text_and_ids,
    }


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """The sizes of a model, counted on the meta device: no weights are read or allocated.

    Raises:
        RecipeError: nothing can be built from that configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except model_errors() as error:
        raise RecipeError(f"model.model_name_or_path: no model can be built from its config.json: {reason_of(error)}") from error
    text = config.get_text_config()
    embeddings = {id(module.weight): module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    heads = text.num_attention_heads
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
        embedding_parameters=sum(weight.numel() for weight in embeddings.values()),
    )
