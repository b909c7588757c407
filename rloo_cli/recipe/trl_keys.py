"""Every key of a config file for `trl rloo` (TRL 1.16), and what happens to it here.

The 193 keys are those of the classes that TRL's script parses: its script arguments, RLOOConfig, ModelConfig and
DatasetMixtureConfig; a test compares them with the installed ones. A key that would change the numbers is never ignored:

    honoured    a field of the recipe has this name and meaning
    same        the value that TRL's default has is what happens here by construction; another is refused
    no effect   accepted with any value, and one line says so: it changes no number here
    refused     TRL's default is accepted; another value is refused with the reason
    later       not in this version: TRL's default is accepted, another value is refused

Defaults here are TRL's, for who reads the table; a key that is left out gets OUR default, also where it differs
(`different_defaults`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rloo_cli.recipe.fields import LEAVES


class Treatment(enum.StrEnum):
    """What happens to a key; see the module's docstring."""

    HONOURED = "honoured"
    SAME = "same"
    NO_EFFECT = "no effect"
    REFUSED = "refused"
    LATER = "later"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlKey:
    """One row of the table."""

    treatment: Treatment
    default: Any
    """TRL's default."""
    because: str = ""
    """What stands in its place, or why it is refused; a whole sentence's end, without the full stop."""
    accepts: tuple[Any, ...] = ()
    """Further values that change nothing."""
    needs: str | None = None
    """The key without which TRL does not read this one: accepted without effect as long as that has its default."""
    is_secret: bool = False
    """Whether its value may not stand in a message."""

    def is_harmless(self, value: Any) -> bool:
        """Whether the value changes nothing: TRL's default, one of `accepts`, or null where the default is off."""
        if self.treatment is Treatment.NO_EFFECT or (value is None and not self.default):
            return True
        return any(_equal(value, harmless) for harmless in (self.default, *self.accepts))


def _equal(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _honoured(default: Any, because: str = "") -> TrlKey:
    return TrlKey(treatment=Treatment.HONOURED, default=default, because=because)


def _same(default: Any, because: str, *accepts: Any) -> TrlKey:
    return TrlKey(treatment=Treatment.SAME, default=default, because=because, accepts=accepts)


def _no_effect(default: Any, because: str = "") -> TrlKey:
    return TrlKey(treatment=Treatment.NO_EFFECT, default=default, because=because)


def _refused(default: Any, because: str, *accepts: Any, is_secret: bool = False) -> TrlKey:
    return TrlKey(treatment=Treatment.REFUSED, default=default, because=because, accepts=accepts, is_secret=is_secret)


def _needing(default: Any, *, needs: str) -> TrlKey:
    return TrlKey(treatment=Treatment.REFUSED, default=default, because=f"`{needs}` is not offered", needs=needs)


def _later(default: Any, because: str = "", *accepts: Any, needs: str | None = None) -> TrlKey:
    return TrlKey(treatment=Treatment.LATER, default=default, because=because, accepts=accepts, needs=needs)


_SCRIPT: dict[str, TrlKey] = {
    "dataset_name": _honoured(None),
    "dataset_config": _honoured(None),
    "dataset_train_split": _honoured("train"),
    "dataset_test_split": _honoured("test", "here null: evaluation asked for without a split is an error"),
    "dataset_streaming": _honoured(False),
    "ignore_bias_buffers": _no_effect(False),
    "reward_model_name_or_path": _honoured(None, "an entry `- model:` of `rewards`"),
    "reward_funcs": _honoured(None),
    "datasets": _honoured([]),
    "streaming": _honoured(False, "read as `dataset_streaming`"),
    "test_split_size": _refused(
        None, "what is held out is a split of its own: `dataset_test_split`, or `test_split` of a set of `datasets`"
    ),
}

_NO_QUANTA = "quantized weights take a GPU and bitsandbytes, and are not offered; `dtype: bfloat16` halves the memory of an adapter's model"

_MODEL: dict[str, TrlKey] = {
    "model_name_or_path": _honoured(None),
    "model_revision": _honoured("main"),
    "dtype": _honoured("float32"),
    "attn_implementation": _honoured(None),
    "use_peft": _honoured(False),
    "lora_r": _honoured(16),
    "lora_alpha": _honoured(32),
    "lora_dropout": _honoured(0.05, "here 0: an on-policy ratio is then exactly 1"),
    "lora_target_modules": _honoured(None),
    "lora_target_parameters": _later(None, "an adapter changes whole layers, named in lora_target_modules", []),
    "lora_modules_to_save": _honoured(None),
    "lora_task_type": _same("CAUSAL_LM", "what is trained here is a causal language model"),
    "use_rslora": _honoured(False),
    "use_dora": _later(False, "write `use_rslora`, or plain LoRA"),
    "load_in_8bit": _later(False, _NO_QUANTA),
    "load_in_4bit": _later(False, _NO_QUANTA),
    "bnb_4bit_quant_type": _later("nf4", needs="load_in_4bit"),
    "use_bnb_nested_quant": _later(False, needs="load_in_4bit"),
    "bnb_4bit_quant_storage": _later(None, needs="load_in_4bit"),
}

_RLOO: dict[str, TrlKey] = {
    "model_init_kwargs": _refused(None, "write `dtype` and `model_revision` as fields of their own", {}),
    "trust_remote_code": _refused(False, "a downloaded recipe could set it; it is a flag of the command line, `--trust-remote-code`"),
    "router_aux_loss_coef": _honoured(None, "null is the model's own number in TRL; here 0, no auxiliary loss"),
    "disable_dropout": _honoured(False, "here true: an on-policy ratio is then exactly 1"),
    "num_generations": _honoured(2),
    "num_generations_eval": _honoured(None, "null is num_generations in TRL, sampled; here 1, greedy"),
    "max_completion_length": _honoured(512, "here 256, as the public documentation says"),
    "ds3_gather_for_generation": _later(True, "under ZeRO-3 weights are gathered for sampling one layer at a time, or given to vLLM"),
    "shuffle_dataset": _honoured(True),
    "pad_to_multiple_of": _no_effect("auto", "padding changes no number"),
    "generation_batch_size": _honoured(None),
    "steps_per_generation": _honoured(None),
    "temperature": _honoured(1.0),
    "top_p": _honoured(1.0),
    "top_k": _honoured(0),
    "min_p": _honoured(None),
    "generation_kwargs": _honoured(None, "each option is read as the field of `generation` that means the same; others are refused"),
    "chat_template_kwargs": _honoured(None),
    "repetition_penalty": _honoured(1.0),
    "cache_implementation": _refused(None, "decoding has a cache of its own", "dynamic", "static"),
    "use_vllm": _honoured(False),
    "vllm_mode": _honoured("colocate"),
    "vllm_model_impl": _honoured("vllm"),
    "vllm_enable_sleep_mode": _honoured(False),
    "vllm_structured_outputs_regex": _honoured(None),
    "vllm_server_base_url": _honoured(None),
    "vllm_server_host": _honoured("0.0.0.0", "here 127.0.0.1, the same machine"),  # noqa: S104 - a value of the table, nothing listens
    "vllm_server_port": _honoured(8000),
    "vllm_server_timeout": _honoured(240.0),
    "vllm_group_port": _honoured(51216),
    "vllm_gpu_memory_utilization": _honoured(0.3),
    "vllm_max_model_length": _honoured(None),
    "vllm_tensor_parallel_size": _honoured(1),
    "beta": _honoured(0.05),
    "num_iterations": _honoured(1),
    "epsilon": _honoured(0.2),
    "epsilon_high": _honoured(None),
    "reward_weights": _honoured(None),
    "normalize_advantages": _honoured(False),
    "reward_clip_range": _honoured(None),
    "mask_truncated_completions": _honoured(False),
    "sync_ref_model": _honoured(False),
    "ref_model_mixup_alpha": _honoured(0.6),
    "ref_model_sync_steps": _honoured(512),
    "log_completions": _no_effect(False, "every completion is kept in rollouts/"),
    "log_multimodal": _no_effect(True),
    "num_completions_to_print": _no_effect(None),
    "log_unique_prompts": _no_effect(False),
    "use_transformers_continuous_batching": _no_effect(False, "decoding is a loop of its own"),
    "transformers_continuous_batching_config": _no_effect(None),
    "use_transformers_paged": _no_effect(False),
}

_NO_COMPILER = "packed micro-batches differ in shape from step to step, with which compiled models have not been tried"

_TRAINING: dict[str, TrlKey] = {
    "output_dir": _honoured(None),
    "per_device_train_batch_size": _honoured(8),
    "num_train_epochs": _honoured(3.0),
    "max_steps": _honoured(-1),
    "learning_rate": _honoured(1e-6),
    "lr_scheduler_type": _honoured("linear"),
    "lr_scheduler_kwargs": _honoured(None),
    "warmup_steps": _honoured(0),
    "optim": _honoured("adamw_torch_fused", "here adamw_torch: the same update"),
    "optim_args": _refused(None, "the optimizers' options are the fields adam_beta1, adam_beta2, adam_epsilon and weight_decay", ""),
    "weight_decay": _honoured(0.0),
    "adam_beta1": _honoured(0.9),
    "adam_beta2": _honoured(0.999),
    "adam_epsilon": _honoured(1e-8),
    "optim_target_modules": _refused(None, "every weight has the same optimizer"),
    "gradient_accumulation_steps": _honoured(1),
    "average_tokens_across_devices": _no_effect(True, "the loss is a mean over sequences of all processes"),
    "max_grad_norm": _honoured(1.0),
    "label_smoothing_factor": _same(0.0, "there are no labels to smooth"),
    "bf16": _honoured(None),
    "fp16": _refused(False, "float16 overflows without a loss scaler, which is not offered; mixed precision is bfloat16, `bf16: true`"),
    "bf16_full_eval": _same(False, "evaluation computes in the dtype of training"),
    "fp16_full_eval": _same(False, "evaluation computes in the dtype of training"),
    "tf32": _same(None, "float32 products are computed in float32", False),
    "gradient_checkpointing": _honoured(True),
    "gradient_checkpointing_kwargs": _same(
        None, "checkpointing is the non-reentrant kind", {}, {"use_reentrant": False}, {"use_reentrant": True}
    ),
    "torch_compile": _refused(False, _NO_COMPILER),
    "torch_compile_backend": _refused(None, _NO_COMPILER),
    "torch_compile_mode": _refused(None, _NO_COMPILER),
    "use_liger_kernel": _refused(
        False, "its kernels are for GPUs and take over the loss; the memory of the logits is spared here by `head_chunk`, on any device"
    ),
    "liger_kernel_config": _needing(None, needs="use_liger_kernel"),
    "use_cache": _no_effect(False),
    "neftune_noise_alpha": _refused(
        None, "noise in the embeddings would make the policy that is trained another than the one that sampled"
    ),
    "torch_empty_cache_steps": _no_effect(None),
    "auto_find_batch_size": _refused(False, "`max_tokens_per_micro_batch: auto` finds what fits without changing the batch"),
    "logging_strategy": _no_effect("steps", "metrics.jsonl has every step"),
    "logging_steps": _honoured(10),
    "logging_first_step": _no_effect(False, "metrics.jsonl has every step"),
    "log_on_each_node": _no_effect(True),
    "logging_nan_inf_filter": _no_effect(True, "a loss that is not finite stops the run"),
    "include_num_input_tokens_seen": _no_effect("no", "num_tokens is always reported"),
    "log_level": _no_effect("passive"),
    "log_level_replica": _no_effect("warning"),
    "disable_tqdm": _no_effect(None),
    "report_to": _honoured("none"),
    "run_name": _honoured(None),
    "project": _no_effect("huggingface"),
    "trackio_space_id": _no_effect(None),
    "trackio_bucket_id": _no_effect(None),
    "trackio_static_space_id": _no_effect(None),
    "eval_strategy": _honoured("no"),
    "eval_steps": _honoured(None),
    "eval_delay": _refused(0, "evaluation begins with the first `eval_steps`"),
    "per_device_eval_batch_size": _no_effect(8, "evaluation finds its own batch size"),
    "prediction_loss_only": _no_effect(False),
    "eval_on_start": _honoured(False),
    "eval_do_concat_batches": _no_effect(True),
    "eval_use_gather_object": _no_effect(False),
    "eval_accumulation_steps": _no_effect(None),
    "include_for_metrics": _no_effect([]),
    "batch_eval_metrics": _no_effect(False),
    "save_only_model": _no_effect(False, "a checkpoint always holds what resuming needs"),
    "save_strategy": _honoured("steps"),
    "save_steps": _honoured(500),
    "save_on_each_node": _same(False, "all processes write into one shared folder"),
    "save_total_limit": _honoured(None),
    "enable_jit_checkpoint": _no_effect(False, "a signal always saves before the run ends"),
    "push_to_hub": _honoured(False),
    "hub_token": _refused(None, "a recipe is copied into the run's folder and is no place for secrets", is_secret=True),
    "hub_private_repo": _honoured(None),
    "hub_model_id": _honoured(None, "null is the run folder's name"),
    "hub_strategy": _same("every_save", "the final model is uploaded, once, when training has ended", "end"),
    "hub_always_push": _no_effect(False, "there is one upload, at the end"),
    "hub_revision": _honoured(None),
    "load_best_model_at_end": _refused(
        False, "`final/` is the model after the last step; `metric_for_best_model` keeps the best checkpoint, and the end names it"
    ),
    "metric_for_best_model": _honoured(None),
    "greater_is_better": _honoured(None, "null is true here, whatever the metric's name"),
    "ignore_data_skip": _same(False, "a resumed run goes on with the next prompt"),
    "restore_callback_states_from_checkpoint": _no_effect(False, "a resumed run restores everything"),
    "full_determinism": _refused(False, "on a CPU every run is deterministic; on a GPU it is not promised"),
    "seed": _honoured(42),
    "data_seed": _refused(None, "the order of prompts follows `seed`"),
    "use_cpu": _refused(False, "hide the GPUs instead: `CUDA_VISIBLE_DEVICES= rloo train …`"),
    "accelerator_config": _later(None, "`accelerate_config` names a strategy, or a file of `accelerate config`", {}),
    "parallelism_config": _later(None, "`accelerate_config` names the strategy: ddp, fsdp2, zero2 or zero3"),
    "dataloader_drop_last": _same(False, "the order of prompts runs on across epochs, nothing is dropped"),
    "dataloader_num_workers": _no_effect(0),
    "dataloader_pin_memory": _no_effect(True),
    "dataloader_persistent_workers": _no_effect(False),
    "dataloader_prefetch_factor": _no_effect(None),
    "dataloader_multiprocessing_context": _no_effect(None),
    "dataloader_in_order": _no_effect(True),
    "remove_unused_columns": _same(False, "every column is offered to the reward functions"),
    "label_names": _no_effect(None),
    "train_sampling_strategy": _refused("random", "the order of prompts is set by `shuffle_dataset`"),
    "length_column_name": _no_effect("length"),
    "ddp_find_unused_parameters": _no_effect(None),
    "ddp_bucket_cap_mb": _no_effect(None),
    "ddp_broadcast_buffers": _no_effect(None),
    "ddp_static_graph": _no_effect(None),
    "ddp_backend": _later(None, "NCCL joins GPUs, and gloo processes on a CPU"),
    "ddp_timeout": _no_effect(1800),
    "fsdp": _refused(None, "write `accelerate_config: fsdp2`", "", [], False),
    "fsdp_config": _later(None, needs="fsdp"),
    "deepspeed": _refused(None, "write `accelerate_config: zero2`, `zero3`, or a file of `accelerate config` that names yours"),
    "debug": _refused("", "debugging modes of the Trainer are not offered", []),
    "skip_memory_metrics": _no_effect(True),
    "do_train": _no_effect(False),
    "do_eval": _no_effect(False, "eval_strategy decides"),
    "do_predict": _no_effect(False),
    "resume_from_checkpoint": _refused(None, "it is a flag of the command line, `--resume`", False),
    "local_rank": _no_effect(-1),
}

TRL_KEYS: Mapping[str, TrlKey] = _SCRIPT | _RLOO | _MODEL | _TRAINING
"""Key → what happens to it: all 193 of TRL 1.16."""

_OLD_TRAINER = "it belongs to the RLOO trainer before TRL 0.23 and has no counterpart"
_GRPO = "it is an option of GRPO, not of RLOO"

OTHER_KEYS: Mapping[str, TrlKey] = {
    "env": _refused(None, "a recipe sets no environment variables; set them in the shell", {}),
    "num_machines": _refused(1, "each machine's command line says it: `--num-machines`"),
    "machine_rank": _refused(0, "each machine's command line says it: `--machine-rank`"),
    "main_process_ip": _no_effect(None),
    "main_process_port": _no_effect(None),
    "config_file": _refused(None, "write `accelerate_config:` with the same file", []),
    "mixed_precision": _refused(None, "write `bf16: true` or `bf16: false`"),
    "logging_dir": _no_effect(None, "logs stand in the run's folder"),
    "overwrite_output_dir": _no_effect(False, "an existing run is never overwritten: `--resume`, or another output_dir"),
    "save_safetensors": _same(True, "weights are always saved as safetensors"),
    "group_by_length": _refused(False, "the order of prompts is set by `shuffle_dataset`"),
    "adafactor": _refused(False, "write `optim: adafactor`"),
    "half_precision_backend": _no_effect("auto"),
    "fp16_opt_level": _no_effect("O1"),
    "fp16_backend": _no_effect("auto"),
    "jit_mode_eval": _no_effect(False),
    "use_ipex": _refused(False, "not offered"),
    "use_mps_device": _no_effect(False),
    "past_index": _no_effect(-1),
    "ray_scope": _no_effect("last"),
    "torchdynamo": _refused(None, _NO_COMPILER),
    "include_inputs_for_metrics": _no_effect(False),
    "include_tokens_per_second": _no_effect(False),
    "tpu_num_cores": _no_effect(None),
    "split_batches": _no_effect(None),
    "dispatch_batches": _no_effect(None),
    "push_to_hub_token": _refused(None, "a recipe is copied into the run's folder and is no place for secrets", is_secret=True),
    "fsdp_min_num_params": _later(0, needs="fsdp"),
    "fsdp_transformer_layer_cls_to_wrap": _later(None, needs="fsdp"),
    "wandb_log_unique_prompts": _no_effect(None),
    "dataset_num_proc": _no_effect(None),
    "vllm_lora_sync": _refused("merge", "vLLM gets the weights with the adapter in them; an adapter by itself is not offered"),
    "vllm_device": _refused("auto", "it is the trainer's in colocate mode, and set by CUDA_VISIBLE_DEVICES for `rloo vllm-serve`"),
    "vllm_dtype": _refused("auto", "it is that of sampling here: bfloat16 with `bf16`, else float32; `rloo vllm-serve` has --dtype"),
    "vllm_importance_sampling_correction": _refused(False, "write `importance_sampling_correction: truncate`"),
    "use_liger_loss": _refused(False, _GRPO),
    "loss_type": _refused(None, _GRPO),
    "scale_rewards": _refused(None, f"{_GRPO}; `normalize_advantages` is RLOO's", False, "none"),
    "importance_sampling_level": _refused(None, f"{_GRPO}; the ratio here is one a sequence", "sequence"),
    "delta": _refused(None, _GRPO),
    "top_entropy_quantile": _refused(None, _GRPO, 1.0),
    "sft_model_path": _refused(None, f"{_OLD_TRAINER}: the reference is the model that training starts from"),
    "total_episodes": _refused(None, f"{_OLD_TRAINER}: write `max_steps`"),
    "num_mini_batches": _refused(None, f"{_OLD_TRAINER}: write `steps_per_generation`", 1),
    "missing_eos_penalty": _refused(None, f"{_OLD_TRAINER}: write a reward function that reads completion_ids"),
    "token_level_kl": _refused(None, f"{_OLD_TRAINER}: the KL penalty is a sum over the completion", False),
    "local_rollout_forward_batch_size": _no_effect(64),
    "num_sample_generations": _no_effect(10),
    "stop_token": _refused(None, f"{_OLD_TRAINER}: completions end at the model's own end tokens and at `stop`", "eos"),
    "stop_token_id": _refused(None, f"{_OLD_TRAINER}: completions end at the model's own end tokens and at `stop`"),
}
"""Keys that config files carry beside the 193: TRL's launcher, older versions, and its other trainers."""

RENAMED: Mapping[str, str] = {
    "warmup_ratio": "warmup_steps",
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "reward_model_path": "reward_model_name_or_path",
    "rloo_k": "num_generations",
    "kl_coef": "beta",
    "cliprange": "epsilon",
    "num_ppo_epochs": "num_iterations",
    "normalize_reward": "normalize_advantages",
    "response_length": "max_completion_length",
    "exp_name": "run_name",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
}
"""Older name → today's; a notice says so."""


def known_key(name: str) -> TrlKey | None:
    """The row of a key that is no field of ours, or None."""
    return TRL_KEYS.get(name) or OTHER_KEYS.get(name)


def different_defaults() -> dict[str, tuple[Any, Any, str]]:
    """Honoured keys that mean something else where they are left out: name → (TRL's default, ours, remark)."""
    different = {}
    for name, key in TRL_KEYS.items():
        if name in LEAVES:
            info = LEAVES[name].info
            ours = None if info.is_required() else info.get_default(call_default_factory=True)
            if not _equal(ours, key.default):
                different[name] = (key.default, ours, key.because)
    return different
