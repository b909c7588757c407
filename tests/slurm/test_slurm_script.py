from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a command line prints, run from the root of the clone: (exit code, standard output, standard error)."""
    monkeypatch.chdir(ROOT)

    def run(*words):
        arguments = ["slurm", *words]
        monkeypatch.setattr(sys, "argv", ["/somewhere/rloo", *arguments])
        code = exit_code_of(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_three_scripts_are_shipped():
    assert [path.name for path in SHIPPED] == ["multi-node-vllm.sbatch", "multi-node.sbatch", "single-node.sbatch"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_script_is_what_the_command_in_its_head_prints(path, printed):
    text = path.read_text()
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("#     rloo slurm ")).removeprefix("#"))
    code, out, _ = printed(*command[2:])
    assert code == 0
    assert out == text


SHAPES = {
    "one": ("smoke", "--gpus-per-node", "0", "--cpus-per-node", "4"),
    "one with GPUs": ("deepmath", "--gpus-per-node", "8"),
    "several": ("deepmath", "--gpus-per-node", "4", "--nodes", "3", "--set", "prompts_per_step=12"),
    "several and a server": ("deepmath", "--gpus-per-node", "8", "--nodes", "5", "--server-nodes", "1"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_a_script_that_bash_can_parse(shape, printed, tmp_path):
    code, out, _ = printed(*SHAPES[shape])
    assert code == 0
    (tmp_path / "job.sbatch").write_text(out)
    checked = subprocess.run(["bash", "-n", tmp_path / "job.sbatch"], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert ("server=(" in out, "--num-machines" in out) == (shape == "several and a server", shape.startswith("several"))
    for forbidden in ("pkill", "killall", "kill -9", "<{", "<%", "None"):
        assert forbidden not in out


def test_nodes_gpus_and_processes_are_counted_as_sbatch_and_rloo_count_them(printed):
    _, out, _ = printed("deepmath", "--gpus-per-node", "8", "--nodes", "5", "--server-nodes", "1")
    assert re.findall(r"^#SBATCH --(?:nodes|gres|ntasks-per-node)=\S+", out, re.MULTILINE) == [
        "#SBATCH --nodes=5",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gres=gpu:8",
    ]
    assert 'srun "${step[@]}" --nodes=4 --ntasks=4 --nodelist="$training_nodes"' in out
    assert "--num-processes 32\n    --num-machines 4" in out
    assert "server_node=${nodes[4]}" in out
    assert "--tensor-parallel-size 8\n" in out


def test_the_server_gets_the_trainers_model_dtype_and_length(printed):
    _, out, _ = printed(
        *("deepmath", "--gpus-per-node", "8", "--nodes", "2", "--server-nodes", "1", "--tensor-parallel", "2"),
        *("--set", "model_revision=abc", "--trust-remote-code"),
    )
    server = out[out.index("server=(") :]
    words = shlex.split(server[: server.index("\n)\n")])
    options = dict(zip(words, [*words[1:], ""], strict=True))
    assert options["--model"] == "Qwen/Qwen2-0.5B-Instruct"
    assert options["--revision"] == "abc"
    assert options["--dtype"] == "bfloat16"
    assert (options["--tensor-parallel-size"], options["--data-parallel-size"]) == ("2", "4")
    assert options["--max-model-len"] == "1536"
    assert "--trust-remote-code" in words
    assert "--set generation.vllm_mode=server" in out


def test_values_reach_the_shell_as_they_were_given(printed, tmp_path):
    _, out, _ = printed(
        *("smoke", "--gpus-per-node", "0", "--output-dir", "/data/my runs/$HOME", "--set", "system_prompt=don't; echo `id`"),
        *("--venv", "/opt/a venv", "--setup", "module load cuda/12", "--sbatch-arg=--mail-type=END", "--time", "1:00:00"),
    )
    assert "\nmodule load cuda/12\nexport PATH='/opt/a venv/bin':\"$PATH\"\n" in out
    assert "\n#SBATCH --mail-type=END\n" in out
    assert "\n#SBATCH --time=1:00:00\n" in out
    lines = [line for line in out.splitlines() if line.startswith("run=")]
    training = out[out.index("training=(") : out.index("\n)\n", out.index("training=(")) + 3]
    shell = "\n".join(["step=() logs=x training_nodes=n1", *lines, training, 'printf "%s\\n" "${training[@]}"'])
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[words.index("--set") + 1] == "system_prompt=don't; echo `id`"
    assert words[words.index("--output-dir") + 1] == "/data/my runs/$HOME"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "3", "--server-nodes", "2"), "a vLLM server runs on one node"),
        (("--nodes", "1", "--server-nodes", "1"), "none is left to train"),
        (("--processes-per-node", "9"), "each needs a GPU, and a node has 8"),
        (("--nodes", "2", "--server-nodes", "1", "--tensor-parallel", "3"), "does not divide the 8 GPUs"),
        (("--partition", "a b"), "one word is wanted"),
        (("--setup", "a\nb"), "one line is wanted"),
        (("--setup", "module load cuda; }"), "no lines of shell: line 1: syntax error near unexpected token"),
        (("--setup", "exit 0; }"), "would end the script before it trains"),
        (("--nodes", "100000000"), "800000000 processes would train, and no run has more than 65535"),
        (("--output-dir", "runs/x\ntouch HERE #"), "no line of a batch script may hold"),
        (("--set", "model_revision=a\rb"), "no line of a batch script may hold"),
        (("--time", "-1"), "SLURM takes minutes"),
        (("--sbatch-arg", "mail-type=END"), "an option of sbatch is wanted"),
        (("--print", "--submit"), "one of them"),
        (("--set", "num_generations=1"), "generation.num_generations"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, message, printed):
    code, out, err = printed("deepmath", "--gpus-per-node", "8", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_recipe_whose_path_holds_a_command_is_refused(printed, tmp_path):
    for name in ("smoke.yaml", "smoke"):
        (tmp_path / name).symlink_to(ROOT / "recipes" / name)
    recipe = tmp_path / "n\ntouch HERE #.yaml"
    recipe.write_text((tmp_path / "smoke.yaml").read_text())
    code, out, err = printed(str(recipe), "--gpus-per-node", "0")
    assert (code, out) == (2, "")
    assert "no line of a batch script may hold" in err


def test_without_sbatch_a_submission_says_what_to_do(printed, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = printed("smoke", "--gpus-per-node", "0", "--submit")
    assert code == 2
    assert "no sbatch here" in err
