"""What a step does with the model in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rloo_cli.plan.numbers import BFLOAT16, FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step does with the model, in one of its processes."""

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
    vllm_parts: int = 1
    """Processes that share one engine of vLLM's."""
    vllm_sleeps: bool = False
    """Whether vLLM gives its share back while the policy is updated."""
    wide_head: bool = False
    """Whether the LM head's products are in float32 whatever the precision."""
    reference_moves: bool = False
    """Whether the reference follows the policy: it is then held, and saved, in the dtype of the weights."""
    reward_model_bytes: int = 0
    """Weights of the reward models on this device."""
    on_gpu: bool = False
    adapter_parameters: int = 0
    """Numbers of the adapter that is trained instead of the model, in float32; 0 = the model itself is."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in products, keys and values."""
        return BFLOAT16 if self.low_precision else min(FLOAT32, self.weight_bytes)

    @property
    def sampling_bytes(self) -> int:
        """Bytes of a weight of the model that samples."""
        return BFLOAT16 if self.low_precision else self.weight_bytes

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: no micro-batch can be smaller."""
        return self.prompt_tokens + self.completion_tokens
