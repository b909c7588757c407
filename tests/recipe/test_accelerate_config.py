"""Files of `accelerate config` and the environment of `accelerate launch`: what is read of them, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from recipe_texts import VALID

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.accelerate_config import CONFIGS, read_distribution
from rloo_cli.recipe.accelerate_environment import distribution_of_environment
from rloo_cli.recipe.accelerate_keys import STRATEGIES
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.load import load_recipe

DDP = "distributed_type: MULTI_GPU\n"
FSDP = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
ZERO = "distributed_type: DEEPSPEED\ndeepspeed_config:\n"


def read(folder, text, name="mine.yaml"):
    (folder / name).write_text(text)
    return read_distribution(name, folder)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_shipped_configuration_is_what_its_name_says_and_accelerate_reads_it(name):
    from accelerate.commands.config.config_args import load_config_from_file

    assert read_distribution(name, Path()) == Distribution(strategy=name)
    theirs = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert theirs.distributed_type.value == {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(name, "DEEPSPEED")
    assert theirs.num_machines == 1


def test_what_a_file_says_is_read_and_its_other_keys_are_told_in_one_note(tmp_path):
    text = FSDP + (
        "  fsdp_offload_params: true\n  fsdp_reshard_after_forward: false\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\nnum_processes: 16\n"
        "num_machines: 2\nmachine_rank: 1\nmain_process_ip: head\nmain_process_port: 29501\nmixed_precision: bf16\ndebug: true\n"
        "rdzv_backend: static\ntpu_env: []\n"
    )
    found = read(tmp_path, text)
    assert (found.strategy, found.reshard_after_forward, found.cpu_offload, found.mixed_precision) == ("fsdp2", False, True, "bf16")
    where = (found.num_processes, found.num_machines, found.machine_rank, found.main_process_ip, found.main_process_port)
    assert where == (16, 2, 1, "head", 29501)
    assert [note.partition(": ")[2] for note in found.notes] == ["without effect here: debug", "without effect here: fsdp_auto_wrap_policy"]


def test_zero_is_read_from_both_kinds_of_file(tmp_path):
    found = read(tmp_path, ZERO + "  zero_stage: 3\n  offload_optimizer_device: none\n  offload_param_device: none\n")
    assert (found.strategy, found.zero) == ("zero3", {})
    (tmp_path / "ds.json").write_text(
        '{\t"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": "auto", "offload_optimizer": {"device": "none"},'
        ' "offload_param": null, "cpu_offload": false}, "bf16": {"enabled": "auto"},'
        ' "train_batch_size": "auto", "gradient_clipping": 1.0}'
    )
    found = read(tmp_path, ZERO + "  deepspeed_config_file: ds.json\n")
    assert (found.strategy, found.zero, found.mixed_precision) == ("zero2", {"reduce_bucket_size": 500_000_000}, None)
    assert isinstance(found.zero["reduce_bucket_size"], int)
    assert "gradient_clipping" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n", "mine.yaml:3:3: fsdp_config.fsdp_version: is 1: only the second"),
        ("distributed_type: FSDP\nfsdp_config: {}\n", "fsdp_config.fsdp_version: is missing, which means 1"),
        (
            FSDP + "  fsdp_reshard_after_forward: FULL_SHARD\n",
            "mine.yaml:4:3: fsdp_config.fsdp_reshard_after_forward: 'FULL_SHARD' is neither",
        ),
        (FSDP + "  fsdp_sharding: x\n", "mine.yaml:4:3: fsdp_config.fsdp_sharding: not known here"),
        (ZERO + "  zero_stage: 1\n", "mine.yaml:3:3: deepspeed_config.zero_stage: stage 1 is not offered: stage 2 needs less memory"),
        (
            ZERO + "  zero_stage: 3\n  offload_param_device: nvme\n",
            "mine.yaml:4:3: deepspeed_config.offload_param_device: DeepSpeed's offloading is not offered; fsdp2's is: `distributed_type: FSDP`",
        ),
        (ZERO + "  offload_optimizer_device: cpu\n", "mine.yaml:3:3: deepspeed_config.offload_optimizer_device: DeepSpeed's offloading is"),
        (ZERO + "  zero_stage: 2\n  deepspeed_config_file: ds.json\n", "deepspeed_config.zero_stage: stands beside deepspeed_config_file"),
        (ZERO + "  deepspeed_config_file: nowhere.json\n", "deepspeed_config.deepspeed_config_file: nowhere.json: no such file"),
        (DDP + "mixed_precision: fp16\n", "mine.yaml:2:1: mixed_precision: 'fp16' is not offered; `bf16` or `no`"),
        (DDP + "num_processes: -1\n", "mine.yaml:2:1: num_processes: '-1' is no whole number from 1 to 65535"),
        (DDP + "num_processes: 1000000000\n", "mine.yaml:2:1: num_processes: '1000000000' is no whole number from 1 to 65535"),
        (DDP + "main_process_port: 65536\n", "main_process_port: '65536' is no whole number from 0 to 65535"),
        (DDP + f"num_processes: {'9' * 5000}\n", "mine.yaml:2:1: num_processes: '99"),
        (FSDP + f"  fsdp_offload_params: {'x' * 5000}\n", "x… is neither true nor false"),
        (FSDP.replace("2", "x" * 5000), "x…: only the second version"),
        (DDP + "a: &x 1\n", "mine.yaml:2:4: anchors (&x) are refused"),
        (DDP + "a: !!str x\n", "tags (tag:yaml.org,2002:str) are refused; a file of `accelerate config` is plain data"),
        (DDP + "<<: 1\n", "merge keys (<<) are refused; write the values out"),
        (DDP + "---\na: 1\n", "a second YAML document begins here; a file of `accelerate config` is one"),
        (
            ZERO + "  deepspeed_config_file: /dev/zero\n",
            "mine.yaml:3:3: deepspeed_config.deepspeed_config_file: /dev/zero: is not a regular file",
        ),
        (DDP + "colour: red\n", "mine.yaml:2:1: colour: not known here"),
        ("distributed_type: TPU\n", "distributed_type: 'TPU' is not offered; MULTI_GPU, FSDP or DEEPSPEED"),
        ("num_processes: 2\n", "distributed_type: missing"),
        ("- 1\n", "expected a mapping"),
        (
            FSDP + "deepspeed_config:\n  zero_stage: 3\n",
            "mine.yaml:4:1: deepspeed_config: is of distributed_type DEEPSPEED, and the file says FSDP",
        ),
        (DDP + "fsdp_config:\n  fsdp_version: 2\n", "mine.yaml:2:1: fsdp_config: is of distributed_type FSDP, and the file says MULTI_GPU"),
        (DDP + "compute_environment: AMAZON_SAGEMAKER\n", "only LOCAL_MACHINE is offered"),
    ],
)
def test_what_would_train_otherwise_than_it_says_is_refused_with_its_place(tmp_path, text, line):
    with pytest.raises(RecipeError) as raised:
        read(tmp_path, text)
    assert line in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', "ds.json: fp16: not offered"),
        ('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}', "ds.json: optimizer: the recipe says it"),
        ('{"zero_optimization": {"stage": 0}}', "zero_optimization.stage: stage 0 is not offered"),
        (
            '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
            "ds.json: zero_optimization.offload_optimizer: Deep",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
            "zero_optimization.offload_param: .*fsdp_offload_params",
        ),
        (
            '{"zero_optimization": {"stage": 2, "cpu_offload": true}}',
            "zero_optimization.cpu_offload: DeepSpeed's offloading is not offered",
        ),
        ("{}", "zero_optimization: missing"),
        ("nonsense", "ds.json:1:1: not JSON: Expecting value"),
        ("[" * 20_000, "ds.json: more than 20 levels of nesting"),
        ('{"a":' * 30 + "1" + "}" * 30, "ds.json: more than 20 levels of nesting"),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', "ds.json: the key `stage` stands twice"),
        ('{"zero_optimization": {"stage": NaN}}', "ds.json: NaN is no JSON number"),
        ('{"zero_optimization": {"stage": ' + "9" * 5000 + "}}", "ds.json: it holds a number of thousands of digits"),
        (" " * (1 << 20) + "{}", "ds.json: is larger than 1 MiB; a file of DeepSpeed's own is a short JSON file"),
        ('{"zero_optimization": {"stage": 2, "reduce_bucket_size": -5}}', "reduce_bucket_size: -5 is neither a whole number from 1 on"),
        ('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}', "reduce_bucket_size: 0 is neither"),
        ('{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "lots"}}', 'stage3_prefetch_bucket_size: "lots" is neither'),
        ('{"zero_optimization": {"stage": 3, "sub_group_size": 1e400}}', "sub_group_size: Infinity is neither"),
        ('{"zero_optimization": {"stage": 3, "sub_group_size": true}}', "sub_group_size: true is neither"),
    ],
)
def test_a_file_of_deepspeeds_own_is_refused_likewise(tmp_path, document, line):
    (tmp_path / "ds.json").write_text(document)
    with pytest.raises(RecipeError, match=line) as raised:
        read(tmp_path, ZERO + "  deepspeed_config_file: ds.json\n")
    assert raised.value.message.startswith(f"{tmp_path}/mine.yaml:3:3: deepspeed_config.deepspeed_config_file: ")
    assert "\n" not in raised.value.message


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "ds.json")
    with pytest.raises(RecipeError, match=r"ds.json: is not a regular file; a file of DeepSpeed's own is one JSON file"):
        read(tmp_path, ZERO + "  deepspeed_config_file: ds.json\n")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".yaml", "a\0b"])
def test_a_name_that_no_file_can_have_is_one_line(name):
    with pytest.raises(RecipeError) as raised:
        read_distribution(name, Path())
    assert "\n" not in raised.value.message


def test_each_fault_of_such_a_file_is_a_line_of_the_recipes_errors(tmp_path):
    (tmp_path / "mine.yaml").write_text(DDP + "a: &x 1\nb: *x\nc: *x\n")
    message = refusal(tmp_path, f"run: {{accelerate_config: {tmp_path}/mine.yaml}}\n", {})
    lines = message.splitlines()
    assert [line.partition(": run.accelerate_config: ")[2].removeprefix(f"{tmp_path}/")[:17] for line in lines[:3]] == [
        "mine.yaml:2:4: an",
        "mine.yaml:3:4: al",
        "mine.yaml:4:4: al",
    ]


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "environment variable FSDP_VERSION: is 1: only the second version"),
        (
            {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true", "FSDP_VERSION": "2"},
            "environment variable ACCELERATE_USE_DEEPSPEED: contradicts ACCELERATE_USE_FSDP",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "9" * 5000},
            "environment variable ACCELERATE_DEEPSPEED_ZERO_STAGE: stage 99",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"},
            "environment variable ACCELERATE_DEEPSPEED_CONFIG_FILE: nowhere.json: no such file.",
        ),
    ],
)
def test_a_fault_of_the_environment_is_placed_there(tmp_path, environ, line):
    message = refusal(tmp_path, "", environ)
    assert message.startswith(line)
    assert "\n" not in message


def refusal(folder, text, environ):
    (folder / "r.yaml").write_text(VALID + text)
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(folder / "r.yaml"), is_training=True, environ=environ)
    return raised.value.message


def test_a_name_that_is_none_is_told_the_names():
    with pytest.raises(RecipeError, match="`fsdp` is none of ddp, fsdp2, zero2, zero3, and no file"):
        read_distribution("fsdp", Path())


def test_the_environment_of_accelerate_launch_says_the_layout():
    assert distribution_of_environment({}) is None
    assert distribution_of_environment({"ACCELERATE_USE_FSDP": "false"}) is None
    found = distribution_of_environment(
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_OFFLOAD_PARAMS": "true"}
    )
    assert found == Distribution(strategy="fsdp2", reshard_after_forward=False, cpu_offload=True)
    zero = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    assert distribution_of_environment(zero) == Distribution(strategy="zero3")
    for environ in (
        {"ACCELERATE_USE_FSDP": "true"},
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
        zero | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
        zero | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
    ):
        with pytest.raises(RecipeError):
            distribution_of_environment(environ)


@pytest.mark.parametrize("name", ["fsdp2", "zero2", "zero3"])
def test_accelerates_own_launcher_makes_that_environment_of_our_files(name, tmp_path):
    """`accelerate launch` on a machine without GPUs starts one process; what it puts into its environment is what is read."""
    script = tmp_path / "show.py"
    script.write_text(
        "import os\nfrom rloo_cli.recipe.accelerate_environment import distribution_of_environment\nprint(distribution_of_environment(os.environ))\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{name}.yaml"), "--num_processes", "1"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().splitlines()[-1:] == [str(Distribution(strategy=name))], done.stdout + done.stderr


def test_configurations_are_short_plain_yaml():
    for file in CONFIGS.glob("*.yaml"):
        assert yaml.safe_load(file.read_text())["distributed_type"]
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == set(STRATEGIES)
