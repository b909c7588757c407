import dataclasses

import pytest
import yaml
from recipe_texts import VALID, faults_of, lines_of, load

from rloo_cli.recipe.fields import LEAVES
from rloo_cli.recipe.trl_keys import OTHER_KEYS, RENAMED, TRL_KEYS, Treatment, different_defaults, known_key


def installed_keys():
    """Key → default, of every class that TRL's `trl rloo` command parses."""
    trl = pytest.importorskip("trl", reason="TRL is not installed; the table is compared with its classes where it is")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the table is that of TRL 1.16; {trl.__version__} is installed")
    from trl.scripts.rloo import RLOOScriptArguments

    keys = {}
    for cls in (RLOOScriptArguments, trl.RLOOConfig, trl.ModelConfig, trl.DatasetMixtureConfig):
        for field in dataclasses.fields(cls):
            if field.init:
                assert field.name not in keys
                keys[field.name] = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return keys


def test_the_table_is_that_of_the_installed_classes():
    installed = installed_keys()
    assert len(TRL_KEYS) == len(installed) == 193
    assert TRL_KEYS.keys() == installed.keys()
    for name, default in installed.items():
        assert getattr(default, "value", default) == TRL_KEYS[name].default, name


def test_honoured_keys_are_fields_and_the_others_are_not():
    for name, key in TRL_KEYS.items():
        is_field = name in LEAVES or name in (
            "reward_funcs",
            "reward_weights",
            "reward_model_name_or_path",
            "generation_kwargs",
            "streaming",
        )
        assert is_field == (key.treatment is Treatment.HONOURED), name
    assert not OTHER_KEYS.keys() & (TRL_KEYS.keys() | LEAVES.keys())
    assert all(name not in LEAVES and not known_key(name) for name in RENAMED)
    assert all(today in LEAVES or known_key(today) for today in RENAMED.values())


def test_every_refusal_has_a_reason():
    for name, key in (TRL_KEYS | OTHER_KEYS).items():
        if key.treatment in (Treatment.SAME, Treatment.REFUSED):
            assert key.because, name
        assert not key.because.endswith("."), name
        assert key.needs is None or known_key(key.needs), name


def test_a_file_that_writes_out_every_default_of_trl_is_a_recipe():
    defaults = {name: key.default for name, key in TRL_KEYS.items()}
    defaults |= {"model_name_or_path": "a/b", "dataset_name": "c/d", "reward_funcs": ["accuracy_reward"]}
    loaded = load(yaml.safe_dump(defaults))
    assert loaded.recipe.generation.max_completion_length == 512
    assert loaded.recipe.training.optim == "adamw_torch_fused"
    assert [line for line in loaded.notices if "accepted without effect: " in line]


def test_a_config_in_the_style_of_the_public_documentation_is_a_recipe():
    loaded = load("""\
# Run with `trl rloo --config`
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dtype: bfloat16
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, think_format_reward, get_soft_overlong_punishment, my_lib.rewards.custom]
reward_weights: [1.0, 0.5, 0.25, 2]
output_dir: Qwen2-0.5B-RLOO
learning_rate: 1e-5
bf16: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
num_generations: 8
max_completion_length: 1024
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: '{"min_lr_rate": 0.1}'
warmup_ratio: 0.05
report_to: wandb
log_completions: true
use_vllm: false
vllm_mode: server
lora_r: 64
do_train: true
eval_strategy: no
disable_tqdm: true
""")
    recipe = loaded.recipe
    assert [(entry.function, entry.weight) for entry in recipe.rewards] == [
        ("rloo_cli.rewards.accuracy_reward", 1.0),
        ("rloo_cli.rewards.think_format_reward", 0.5),
        ("rloo_cli.rewards.get_soft_overlong_punishment", 0.25),
        ("my_lib.rewards.custom", 2.0),
    ]
    assert recipe.training.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert recipe.training.warmup_steps == 0.05
    assert recipe.run.report_to == ["wandb"]
    assert loaded.batch.prompts_per_step == 2
    assert loaded.notices == (
        "r.yaml:18:1: warmup_ratio: an older name of `training.warmup_steps`; read as that.",
        "r.yaml: accepted without effect: log_completions (every completion is kept in rollouts/), do_train, disable_tqdm.",
        "r.yaml:22:12: generation.vllm_mode: not read: use_vllm is false.",
        "r.yaml:23:9: model.lora_r: not read: use_peft is false.",
    )


REFUSALS = {
    "load_in_4bit: true": "load_in_4bit: `true` is not in this version: quantized weights take a GPU and bitsandbytes, and are not offered; `dtype: bfloat16` halves the memory of an adapter's model. Remove the key, or write TRL's default, false.",
    "use_dora: true": "use_dora: `true` is not in this version: write `use_rslora`, or plain LoRA. Remove the key, or write TRL's default, false.",
    "lora_task_type: SEQ_CLS": 'lora_task_type: `SEQ_CLS` is refused: what is trained here is a causal language model; only "CAUSAL_LM" is offered.',
    "deepspeed: zero3.json": "deepspeed: `zero3.json` is refused: write `accelerate_config: zero2`, `zero3`, or a file of `accelerate config` that names yours.",
    "fp16: true": "fp16: `true` is refused: float16 overflows without a loss scaler, which is not offered; mixed precision is bfloat16, `bf16: true`.",
    "trust_remote_code: true": "trust_remote_code: `true` is refused: a downloaded recipe could set it; it is a flag of the command line, `--trust-remote-code`.",
    "resume_from_checkpoint: true": "resume_from_checkpoint: `true` is refused: it is a flag of the command line, `--resume`.",
    "dataloader_drop_last: true": "dataloader_drop_last: `true` is refused: the order of prompts runs on across epochs, nothing is dropped; only false is offered.",
    "hub_token: hf_secret": "hub_token: this value is refused: a recipe is copied into the run's folder and is no place for secrets.",
    "model_init_kwargs: {attn_implementation: eager}": "model_init_kwargs: this value is refused: write `dtype` and `model_revision` as fields of their own.",
    "no_cuda: true": "use_cpu: `true` is refused: hide the GPUs instead: `CUDA_VISIBLE_DEVICES= rloo train …`.",
    "env: {A: b}": "env: this value is refused: a recipe sets no environment variables; set them in the shell.",
    "loss_type: dapo": "loss_type: `dapo` is refused: it is an option of GRPO, not of RLOO.",
    "total_episodes: 1000": "total_episodes: `1000` is refused: it belongs to the RLOO trainer before TRL 0.23 and has no counterpart: write `max_steps`.",
    "warmup_ratio: 1.5": "training.warmup_steps: warmup_ratio is a share of all steps, from 0 to below 1.",
    "label_smoothing_factor: true": "label_smoothing_factor: `true` is refused: there are no labels to smooth; only 0.0 is offered.",
}


@pytest.mark.parametrize(("text", "message"), REFUSALS.items(), ids=REFUSALS)
def test_a_key_that_would_change_something_is_refused_with_the_reason(text, message):
    lines = faults_of(VALID + text + "\n")
    assert lines == [f"7:{text.index(' ') + 2}: {message}"]
    assert "hf_secret" not in "".join(lines)


def test_a_secret_on_the_command_line_is_not_repeated():
    assert lines_of(VALID, "hub_token=hf_secret")[0] == (
        "--set hub_token=…: hub_token: this value is refused: a recipe is copied into the run's folder and is no place for secrets."
    )


def test_keys_below_a_refused_switch_are_not_refused_again():
    lines = faults_of(VALID + "load_in_4bit: true\nbnb_4bit_quant_type: fp4\nuse_bnb_nested_quant: true\n")
    assert [line.split(": ")[1] for line in lines] == ["load_in_4bit"]


def test_a_later_layer_can_take_a_refused_key_back():
    assert load(VALID + "load_in_4bit: true\n", "load_in_4bit=false").notices == ()


def test_trl_keys_may_stand_in_sections_too():
    assert lines_of(VALID + "training:\n  fp16: true\n")[0].startswith("8:9: fp16: `true` is refused: float16")


OLD_NAMES = {
    "torch_dtype: bfloat16\nlearning_rate: 1e-4": ("model", "dtype", "bfloat16"),
    "evaluation_strategy: no": ("evaluation", "eval_strategy", "no"),
    "rloo_k: 4": ("generation", "num_generations", 4),
    "kl_coef: 0.03": ("algorithm", "beta", 0.03),
    "cliprange: 0.3\nnum_iterations: 2": ("algorithm", "epsilon", 0.3),
    "num_ppo_epochs: 4": ("algorithm", "num_iterations", 4),
    "response_length: 53": ("generation", "max_completion_length", 53),
}


@pytest.mark.parametrize(("text", "expected"), OLD_NAMES.items(), ids=OLD_NAMES)
def test_older_names_are_read_with_a_notice(text, expected):
    section, name, value = expected
    loaded = load(VALID + text + "\n")
    assert getattr(getattr(loaded.recipe, section), name) == value
    assert loaded.notices == (f"r.yaml:7:1: {text.partition(':')[0]}: an older name of `{section}.{name}`; read as that.",)


UNSET = {
    "bf16: null": ("training", "bf16", True),
    "min_p: null": ("generation", "min_p", 0.0),
    "num_generations_eval: null": ("evaluation", "num_generations_eval", 1),
    "lr_scheduler_kwargs: null": ("training", "lr_scheduler_kwargs", {}),
    "report_to: none": ("run", "report_to", []),
    "report_to: [none]": ("run", "report_to", []),
    "report_to: tensorboard": ("run", "report_to", ["tensorboard"]),
    "chat_template_kwargs: '{\"enable_thinking\": false}'": ("data", "chat_template_kwargs", {"enable_thinking": False}),
}


@pytest.mark.parametrize(("text", "expected"), UNSET.items(), ids=UNSET)
def test_values_in_the_forms_that_trl_takes(text, expected):
    section, name, value = expected
    assert getattr(getattr(load(VALID + text + "\n").recipe, section), name) == value


def test_a_default_that_differs_from_trl_is_known_and_few():
    differing = {name: (theirs, ours) for name, (theirs, ours, _) in different_defaults().items()}
    assert differing == {
        "dataset_test_split": ("test", None),
        "model_revision": ("main", None),
        "router_aux_loss_coef": (None, 0.0),
        "disable_dropout": (False, True),
        "lora_dropout": (0.05, 0.0),
        "lora_modules_to_save": (None, []),
        "lora_target_modules": (None, []),
        "num_generations_eval": (None, 1),
        "max_completion_length": (512, 256),
        "min_p": (None, 0.0),
        "chat_template_kwargs": (None, {}),
        "per_device_train_batch_size": (8, None),
        "lr_scheduler_kwargs": (None, {}),
        "optim": ("adamw_torch_fused", "adamw_torch"),
        "gradient_accumulation_steps": (1, None),
        "bf16": (None, True),
        "report_to": ("none", []),
        "vllm_server_host": ("0.0.0.0", "127.0.0.1"),
    }
