"""The fields of a recipe: names, types, defaults and what each one means. Imports no torch.

A leaf name is unique over all sections and is the name that the field already has in the ecosystem. Bounds that one
field alone can break stand here; rules between fields stand in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
AutoInt = Annotated[int, Field(ge=1)] | Literal["auto"]
AutoCount = Annotated[int, Field(ge=1, le=1024)] | Literal["auto"]
"""Threads or processes: more than any machine has crash it."""


class Section(BaseModel):
    """A frozen group of fields; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """Which model is trained, and how its weights are held."""

    model_name_or_path: str = Field(description="Hub id or local folder of a decoder-only causal language model (safetensors).")
    model_revision: str | None = Field(None, description="Branch, tag or commit on the hub; null = the default branch.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="How the trained weights are held. float32 keeps master weights; bfloat16 has no master copy and loses small updates (a warning below a learning rate of 1e-5).",
    )
    attn_implementation: Literal["sdpa", "eager"] | None = Field(
        None,
        description="Attention of plain passes, by its name in transformers; null = the model's own choice, and eager where the model caps its attention scores (Gemma 2), which sdpa leaves out. Packed passes have one of their own, and are taken under `layout: auto` only where they agree with it.",
    )
    random_weights: bool = Field(
        False,
        description="Start from random weights (from `seed`) made from the folder's config.json: for smoke tests; the folder needs no weights.",
    )
    use_peft: bool = Field(
        False,
        description="Train a LoRA adapter and leave the model as it is (needs the extra `peft`). Where model_name_or_path is an adapter's folder, that adapter is trained on, with the settings that it has. docs/lora.md says more.",
    )
    lora_r: PositiveInt = Field(16, description="Rank of a new adapter.")
    lora_alpha: PositiveInt = Field(32, description="Scale of a new adapter: its part is multiplied by lora_alpha / lora_r.")
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Dropout before a new adapter, whatever disable_dropout says; above 0 the KL comes from a scoring pass of its own.",
    )
    lora_target_modules: list[str] = Field(
        default_factory=list,
        description="Names of the layers that a new adapter changes, such as [q_proj, v_proj]; [all-linear] = every linear layer but the LM head; empty = as peft has it for this kind of model.",
    )
    lora_modules_to_save: list[str] = Field(
        default_factory=list,
        description="Modules, by the ends of their names, that are trained as a whole beside a new adapter, such as [norm]; a copy of each.",
    )
    use_rslora: bool = Field(False, description="Multiply a new adapter's part by lora_alpha / √lora_r instead.")
    chat_template_path: str | None = Field(
        None, description="File with a Jinja chat template that replaces the tokenizer's own, for base models that have none."
    )


class DatasetEntry(Section):
    """One set of a mixture."""

    path: str = Field(description="What `dataset_name` may be: a hub id, a folder or a file.")
    name: str | None = Field(None, description="Configuration (subset) of a hub data set.")
    split: str = Field("train", description="Split to train on.")
    test_split: str | None = Field(
        None, description="Split to evaluate on; null = `dataset_test_split`, where some set names none, else this set is not evaluated on."
    )
    prompt_column: str | None = Field(None, description="Column that holds the prompt; null = the section's `prompt_column`.")
    columns: list[str] | None = Field(None, description="Columns to read, the prompt's among them; null = all.")
    fraction: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Share of the mixture, among those of all sets: each set then gives its first rows, as many as keep these shares without repeating a row.",
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="How often this set gives the next prompt, relative to the weights of all sets; each set begins again at its end. null = every row once a pass.",
    )


class DataSection(Section):
    """Where prompts come from and how they become tokens."""

    dataset_name: str | None = Field(
        None,
        description="Hub id, local folder, saved `datasets` folder, or a .jsonl, .json, .parquet or .csv file. Required, unless `datasets`.",
    )
    datasets: list[DatasetEntry] = Field(
        default_factory=list, description="Several sets in place of one: a mixture, each entry with a `path` and what docs/data.md says."
    )
    dataset_streaming: bool = Field(
        False,
        description="Read the training split while training goes on and never hold it as a whole; needs max_steps. `streaming` says the same for a mixture.",
    )
    shuffle_buffer_size: PositiveInt = Field(
        1000, description="With dataset_streaming: neighbouring rows that are read, checked and, with shuffle_dataset, shuffled together."
    )
    dataset_config: str | None = Field(None, description="Configuration (subset) of a hub data set.")
    dataset_train_split: str = Field("train", description="Split to train on.")
    dataset_test_split: str | None = Field(None, description="Split to evaluate on; needed when `eval_strategy` is not `no`.")
    prompt_column: str = Field(
        "prompt", description="Column that holds the prompt: a string, or a list of chat messages. Reward functions see it as `prompts`."
    )
    system_prompt: str | None = Field(
        None, description="System message put before every prompt; a string prompt becomes a user message after it."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the chat template, such as `enable_thinking: false`."
    )
    max_prompt_length: PositiveInt | None = Field(
        None, description="Longest prompt in tokens; null = the model's context less `max_completion_length`. Prompts are never cut."
    )
    overlong_prompts: Literal["error", "drop"] = Field(
        "error", description="What happens to prompts that are too long: an error before training, or left out with a count."
    )
    shuffle_dataset: bool = Field(
        True, description="Whether each epoch runs through the prompts in a new order, a pure function of (seed, epoch, position)."
    )
    max_train_samples: PositiveInt | None = Field(
        None, description="Use only the first n rows of the training split; of each set's, in a mixture."
    )

    @property
    def has_test_split(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.dataset_test_split is not None or any(entry.test_split is not None for entry in self.datasets)


class RewardEntry(Section):
    """One reward function and how it is called, or one reward model."""

    function: str | None = Field(
        None,
        description="Dotted import path of a function; a name without a dot is a built-in of rloo_cli.rewards. Each entry has this or `model`.",
    )
    model: str | None = Field(
        None, description="Hub id or folder of a sequence-classification model with one label, whose score is the reward (safetensors)."
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    name: str | None = Field(None, description="Name in metrics and rollouts; null = the function's name, or the model's.")
    revision: str | None = Field(None, description="Of a model: branch, tag or commit on the hub; null = the default branch.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of a model: how its weights are held and computed with; auto = as in its files."
    )
    device: Literal["auto", "cpu"] = Field(
        "auto", description="Of a model: auto = the trainer's device; each process has a copy of its own."
    )
    batch_size: PositiveInt = Field(32, description="Of a model: rows that it scores at once, of about equal length.")
    max_length: PositiveInt | None = Field(
        None,
        description="Of a model: tokens of prompt and completion that it reads; longer rows are cut as its tokenizer says (at the end, as a rule) and counted; null = what it was built for.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Fixed keyword arguments passed at every call.")
    timeout: Annotated[float, Field(gt=0)] = Field(30.0, description="Seconds an item may take; a call of G items has G times as long.")
    on_error: Literal["stop", "unscored"] = Field(
        "stop", description="After an item failed twice: stop the run (exit 4), or leave the item out of the group's baseline and count it."
    )
    call: Literal["group", "batch"] = Field(
        "group", description="One call a group as soon as it is finished, or one call for the whole generation batch."
    )
    env: list[str] = Field(
        default_factory=list, description="Environment variables that the worker may see although their names look like secrets."
    )
    run_in: Literal["worker", "trainer"] = Field(
        "worker", description="In a worker process with a deadline, or inside the trainer without one (for rewards that need its GPU)."
    )


class GenerationSection(Section):
    """How completions are sampled."""

    num_generations: Annotated[int, Field(ge=2)] = Field(
        2, description="Completions of each prompt, G: the group whose members are each other's baseline."
    )
    max_completion_length: PositiveInt | None = Field(256, description="Longest completion in tokens; null = up to the model's context.")
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="Sampling temperature; it divides the logits in training too.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Nucleus sampling: smallest set of tokens whose probability reaches this; 1 = off."
    )
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="Sample among the k most probable tokens; 0 = off.")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Drop tokens less probable than this share of the most probable one; 0 = off."
    )
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Divides (or multiplies) the logits of tokens seen in prompt or completion; 1 = off."
    )
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion; the string itself stays.")
    use_vllm: bool = Field(False, description="Whether vLLM makes the completions; else the transformers model itself does.")
    vllm_mode: Literal["colocate", "server"] = Field(
        "colocate", description="vLLM inside the trainer's process, on its device; or a server of its own, started by `rloo vllm-serve`."
    )
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = Field(
        "vllm", description="Whose model code vLLM runs (colocate): its own, transformers', or its own where it has the architecture."
    )
    vllm_gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.3, description="Share of the GPU's memory that vLLM takes (colocate)."
    )
    vllm_tensor_parallel_size: PositiveInt = Field(
        1, description="Neighbouring training processes that share one engine, each with a part of its weights (colocate)."
    )
    vllm_max_model_length: PositiveInt | None = Field(
        None, description="Longest prompt and completion in vLLM (colocate); null = longest prompt of the data and max_completion_length."
    )
    vllm_enable_sleep_mode: bool = Field(
        False, description="Whether vLLM gives its memory back while the policy is updated (colocate, GPUs only)."
    )
    vllm_structured_outputs_regex: str | None = Field(
        None, description="Regular expression that every completion has to match as a whole (vLLM alone); null = any completion."
    )
    vllm_server_base_url: str | None = Field(None, description="Address of the server; null = http://vllm_server_host:vllm_server_port.")
    vllm_server_host: str = Field("127.0.0.1", description="Host of the server.")
    vllm_server_port: Annotated[int, Field(ge=1, le=65535)] = Field(8000, description="Port of the server.")
    vllm_server_key_file: str | None = Field(
        None, description="File with the server's key; null = the environment variable RLOO_VLLM_KEY, if it is set."
    )
    vllm_server_timeout: Annotated[float, Field(gt=0)] = Field(240.0, description="Seconds to wait at the start until the server is up.")
    vllm_server_retry_seconds: Annotated[float, Field(gt=0)] = Field(
        120.0, description="Seconds of trying again while a server is away or failing, before the run ends (exit 5) with a checkpoint kept."
    )
    vllm_weight_transfer: Literal["auto", "nccl", "gloo", "file"] = Field(
        "auto",
        description="How new weights reach the server: NCCL between GPUs, gloo between CPUs, or files in a folder that both sides see.",
    )
    vllm_weight_transfer_dir: str | None = Field(
        None, description="Folder for `vllm_weight_transfer: file`; null = weights/ in the run folder."
    )
    vllm_group_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        51216, description="Port at which trainer and server meet for the weight transfer (nccl, gloo)."
    )


class AlgorithmSection(Section):
    """What is optimised."""

    beta: NonNegativeFloat = Field(0.05, description="Weight of the KL penalty to the reference model; 0 = no reference model is loaded.")
    sync_ref_model: bool = Field(
        False,
        description="Whether the reference model follows the policy: every ref_model_sync_steps it becomes α · policy + (1 − α) · reference.",
    )
    ref_model_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        0.6, description="α, the policy's share of the new reference (sync_ref_model); 1 = the policy itself."
    )
    ref_model_sync_steps: PositiveInt = Field(512, description="Optimizer steps between two updates of the reference (sync_ref_model).")
    epsilon: NonNegativeFloat = Field(
        0.2,
        description="Clip range of the sequence ratio below (and above, unless epsilon_high); read only when a generation batch is reused.",
    )
    epsilon_high: NonNegativeFloat | None = Field(None, description="Clip range above; null = epsilon.")
    num_iterations: PositiveInt = Field(1, description="Times each generation batch is gone through.")
    normalize_advantages: bool = Field(False, description="Whether advantages are standardised over the generation batch.")
    reward_clip_range: tuple[float, float] | None = Field(
        None, description="Clip the weighted reward sum to [low, high], before the KL penalty."
    )
    mask_truncated_completions: bool = Field(
        False, description="Whether truncated completions are left out of the loss (they still stand in their siblings' baseline)."
    )
    importance_sampling_correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="Correct for the sampler's own log-probs: multiply a row by its capped ratio, leave it out beyond the cap, or only measure.",
    )
    importance_sampling_cap: Annotated[float, Field(gt=0)] = Field(2.0, description="Cap of the sampler-to-trainer ratio.")
    router_aux_loss_coef: NonNegativeFloat = Field(
        0.0,
        description="Mixtures of experts: factor of the auxiliary loss that keeps the experts' shares of each row's tokens even; 0 = none. No row is then left out of the pass.",
    )
    dynamic_sampling: Literal["off", "filter", "resample"] = Field(
        "off",
        description="What becomes of groups whose completions all got the same reward: trained on like the others, left out of the step, or replaced by further prompts. docs/dynamic-sampling.md says what that optimises.",
    )
    dynamic_sampling_max_batches: Annotated[int, Field(ge=2, le=64)] = Field(
        4,
        description="Prompts that `resample` may draw for a generation batch, as a multiple of the batch; beyond, the step goes on with what it has.",
    )


OPTIMIZERS = Literal["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"]
SCHEDULES = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]


class TrainingSection(Section):
    """Batches, optimizer and numerics."""

    prompts_per_step: PositiveInt | None = Field(
        None,
        description="Prompts of an optimizer step, the simple way to say the batch: times num_generations completions, on any number of processes.",
    )
    per_device_train_batch_size: PositiveInt | None = Field(
        None,
        description="Completions a device takes at once (TrainingArguments' name); also caps the rows of a micro-batch. Default 8 without prompts_per_step.",
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        None, description="Micro-steps of per_device_train_batch_size in an optimizer step; default 1."
    )
    steps_per_generation: PositiveInt | None = Field(
        None, description="Micro-steps that one generation batch serves; null = gradient_accumulation_steps, one optimizer step."
    )
    generation_batch_size: PositiveInt | None = Field(
        None,
        description="Completions of a generation batch, over all processes: the other way to say steps_per_generation; a multiple of the completions of an optimizer step.",
    )
    max_tokens_per_micro_batch: AutoInt = Field(
        "auto", description="Tokens of prompt and completions in one forward and backward pass; whole groups as far as they fit."
    )
    max_steps: Annotated[int, Field(ge=-1)] = Field(-1, description="Optimizer steps; -1 = as many as num_train_epochs needs.")
    num_train_epochs: Annotated[float, Field(gt=0)] = Field(3.0, description="Passes over the prompts when max_steps is -1.")
    async_steps: Annotated[int, Field(ge=0, le=1)] = Field(
        0,
        description="1 = the next batch is generated by the weights of one step before while the policy is updated (vLLM server), with truncated importance weights.",
    )
    learning_rate: NonNegativeFloat = Field(1e-6, description="Peak learning rate.")
    lr_scheduler_type: SCHEDULES = Field("linear", description="Shape of the learning rate over the run.")
    lr_scheduler_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the schedule, such as `min_lr_rate`."
    )
    warmup_steps: NonNegativeFloat = Field(0, description="Steps of linear warm-up; below 1 a share of all steps.")
    optim: OPTIMIZERS = Field("adamw_torch", description="Optimizer, by its TrainingArguments name.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay; biases and norms are exempt.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="Adam's decay of the first moment.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="Adam's decay of the second moment.")
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(1e-8, description="Adam's epsilon.")
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Clip the gradient to this norm; 0 = off.")
    bf16: bool = Field(
        True,
        description="bfloat16 autocast in training and a bfloat16 decode copy; float32 (one line says so) where the device is not fast at it.",
    )
    cast_lm_head_to_fp32: bool = Field(
        False,
        description="Whether training computes the LM head's products in float32 under bf16; the weights stay as they are held, and sampling is as ever.",
    )
    gradient_checkpointing: bool = Field(True, description="Recompute activations in the backward pass to save memory.")
    disable_dropout: bool = Field(True, description="Set every dropout to 0, so that an on-policy ratio is exactly 1.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(42, description="Seed of prompt order, sampling and dropout.")
    layout: Literal["auto", "packed", "plain"] = Field(
        "auto",
        description="packed: one sequence a micro-batch, each prompt once, no padding. plain: padded rows. auto measures both on one group and takes packed where they agree.",
    )
    head_chunk: AutoInt | None = Field(
        "auto",
        description="Completion positions that go through the LM head at once, recomputed in the backward pass; null = all, kept; auto = when memory needs it.",
    )
    threads: AutoCount = Field(
        "auto", description="CPU threads of the trainer; auto is decided once and written to the run's recipe, since it changes rounding."
    )


class EvaluationSection(Section):
    """When and how the model is evaluated on `dataset_test_split`."""

    eval_strategy: Literal["no", "steps", "epoch"] = Field(
        "no", description="Evaluate never, every eval_steps, or every epoch; with steps or epoch also after the last step."
    )
    eval_steps: PositiveInt | None = Field(None, description="Optimizer steps between evaluations; null = logging_steps.")
    eval_on_start: bool = Field(False, description="Whether to evaluate before the first step.")
    eval_temperature: NonNegativeFloat = Field(0.0, description="Temperature of evaluation; 0 = greedy.")
    num_generations_eval: PositiveInt = Field(
        1, description="Completions a prompt in evaluation; above 1 adds pass@k (needs eval_temperature above 0)."
    )
    max_eval_samples: PositiveInt | None = Field(
        None, description="Evaluate only the first n rows of the split; of each set's, in a mixture."
    )


class RunSection(Section):
    """What a run writes, where, and how often."""

    output_dir: str | None = Field(None, description="Run folder; null = runs/<recipe>-<date>-<time>.")
    run_name: str | None = Field(None, description="Name in trackers; null = the run folder's name.")
    logging_steps: PositiveInt = Field(
        10, description="Steps between lines on a terminal and points in trackers; output into a file and metrics.jsonl have every step."
    )
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list, description="Trackers to report to.")
    save_strategy: Literal["no", "steps", "epoch"] = Field(
        "steps", description="Checkpoints never, every save_steps, or every epoch. The final model is always saved."
    )
    save_steps: PositiveInt = Field(500, description="Optimizer steps between checkpoints.")
    save_total_limit: PositiveInt | None = Field(
        None, description="Newest checkpoints to keep, the best by metric_for_best_model among them; null = all."
    )
    metric_for_best_model: str | None = Field(
        None,
        description="Metric of the evaluation by which the best checkpoint is told, such as `reward` or `eval_rewards/<name>/mean`: save_total_limit keeps it, and the end of the run names it. final/ is the last model in any case.",
    )
    greater_is_better: bool | None = Field(None, description="Whether more of metric_for_best_model is better; null = yes.")
    num_processes: AutoCount = Field(
        "auto",
        description="Processes that train together, those of all machines; auto = one for each visible GPU of each machine, one on a CPU.",
    )
    accelerate_config: str = Field(
        "ddp",
        description="How the model lies over the processes: ddp (each holds all of it), fsdp2, zero2 or zero3 (cut over them), or a file of `accelerate config`. `rloo launch-config show NAME` prints one.",
    )
    reward_workers: AutoCount = Field(
        "auto",
        description="Worker processes that run reward functions, for each process that trains; auto = one or two, by the CPUs at hand.",
    )
    reward_memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="GiB that a reward worker and its children may hold together; null = what is available at the start, divided by the workers and the trainer, at least 2.",
    )
    push_to_hub: bool = Field(
        False,
        description="Upload final/ to the hub when training has ended; the token is HF_TOKEN's or that of `hf auth login`. docs/hub.md says more.",
    )
    hub_model_id: str | None = Field(
        None, description="Repository to upload to: `owner/name`, or a name of your own account; null = the run folder's name."
    )
    hub_private_repo: bool | None = Field(
        None, description="Whether a repository that has to be made is private; null = as your account or organisation has it by default."
    )
    hub_revision: str | None = Field(None, description="Branch to upload to, made where it is not there; null = main.")


class Recipe(Section):
    """A whole recipe, every default filled in."""

    model: ModelSection
    data: DataSection
    rewards: list[RewardEntry] = Field(min_length=1, description="Reward functions, summed by weight.")
    generation: GenerationSection = Field(default_factory=GenerationSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    run: RunSection = Field(default_factory=RunSection)
