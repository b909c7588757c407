"""Group E: input. Recipes, data sets and model folders that nobody should trust end in a line, before anything of theirs has run.

Every run has an address space of EXTRA_MEMORY beyond what the imported program takes, so that what would eat the memory fails.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import resource
import shutil
import struct
from pathlib import Path

from bench import in_child
from card import fault

EXTRA_MEMORY = 3 << 29
"""Bytes; a run of the tiny model takes a third of it."""
SOON = 30.0
"""Seconds for what is refused before the first step; most of it is the start of the reward workers on a busy machine."""
CANARY = "canary"
"""A file that hostile code would make."""


def limited(*further):
    """An `inject` that bounds the memory, and leaves a file where a model's weights are loaded."""

    def inject():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_MEMORY,) * 2)
        from rloo_cli.training import setup

        load = setup.load_model

        def noted(*args, **kwargs):
            Path("model-was-loaded").touch()
            return load(*args, **kwargs)

        setup.load_model = noted
        for each in further:
            each()

    return inject


def refused(bench, name, *, says, code, within=SOON, lines=60, settings=(), arguments=(), inject=None, recipe=None, loads=False):
    """Expect a refusal that tells why, leaves neither run folder nor canary, and has not touched the input or loaded a model."""
    before = digest_of(bench.root)
    outcome = bench.train(*arguments, settings=settings, inject=inject or limited(), recipe=recipe)
    bench.check(outcome, code=code, says=says, within=within, lines=lines, where=f"{name}: ")
    line = max(outcome.error.splitlines(), key=len, default="")
    bench.expect("message", len(line) <= 2100 and all(c.isprintable() for c in line), f"{name}: {line[:200]!r}")
    bench.expect("nothing left behind", not outcome.folder.exists(), f"{name}: {outcome.folder.name} is left")
    bench.expect("nothing left behind", not (bench.root / CANARY).exists(), f"{name}: code of the input has run")
    bench.expect("nothing lost", digest_of(bench.root) == before, f"{name}: the input has changed")
    loaded = bench.root / "model-was-loaded"
    bench.expect("bounded time", loads or not loaded.exists(), f"{name}: the model was loaded first")
    loaded.unlink(missing_ok=True)
    return outcome


def digest_of(root):
    """A hash over the names and contents of the regular files below a folder, those of the bench's runs left out."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        own = path.name.startswith((".output-", ".error-")) or path.name == "model-was-loaded" or "__pycache__" in path.parts
        if (
            own
            or path.relative_to(root).parts[0].startswith("run-")
            or path.is_symlink()
            or not path.is_file()
            or path.stat().st_size > 1 << 28
        ):
            continue
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


# --- E1 ----------------------------------------------------------------------------------------------------------------------------

HEAD = "model: {model_name_or_path: model, random_weights: true}\ndata: {dataset_name: prompts.jsonl}\n"
"""Two lines; what follows begins on line 3."""
REWARDS = "rewards: [{function: letters.share_of_letters}]\n"
AT = "bad.yaml:"

BAD_RECIPES = {
    "unknown field": (HEAD + REWARDS + "algorithm: {betta: 1}\n", [AT + "4:13: algorithm.betta: ", "Did you mean `beta`?"]),
    "unknown section": (HEAD + REWARDS + "algoritm: {beta: 1}\n", [AT + "4:1: "]),
    "text for a number": (HEAD + REWARDS + "training: {learning_rate: fast}\n", [AT + "4:27: training.learning_rate: ", "'fast'"]),
    "quoted number": (HEAD + REWARDS + "training: {max_steps: '6'}\n", [AT + "4:23: training.max_steps: "]),
    "true for a number": (HEAD + REWARDS + "training: {learning_rate: true}\n", [AT + "4:27: "]),
    "infinity": (HEAD + REWARDS + "training: {learning_rate: .inf}\n", [AT + "4:27: "]),
    "not a number": (HEAD + REWARDS + "algorithm: {beta: .nan}\n", [AT + "4:19: "]),
    "too large": (HEAD + REWARDS + "training: {learning_rate: 1e999}\n", [AT + "4:27: "]),
    "4,000 digits": (HEAD + REWARDS + f"training: {{max_steps: {'9' * 4000}}}\n", [AT + "4:23: "]),
    "temperature 0": (HEAD + REWARDS + "generation: {temperature: 0}\n", [AT + "4:27: generation.temperature: "]),
    "one completion": (HEAD + REWARDS + "generation: {num_generations: 1}\n", [AT + "4:31: generation.num_generations: "]),
    "negative beta": (HEAD + REWARDS + "algorithm: {beta: -0.1}\n", [AT + "4:19: algorithm.beta: "]),
    "inverted clip range": (HEAD + REWARDS + "algorithm: {reward_clip_range: [1, -1]}\n", [AT + "4:32: algorithm.reward_clip_range: "]),
    "no reward": (HEAD + "rewards: []\n", [AT + "3:10: rewards: "]),
    "missing sections": ("run: {save_steps: 2}\n", ["model.model_name_or_path", "data.dataset_name", "rewards"]),
    "indivisible batch": (
        HEAD + REWARDS + "generation: {num_generations: 4}\ntraining: {per_device_train_batch_size: 6}\n",
        [AT, "per_device_train_batch_size"],
    ),
    "key twice": (HEAD + REWARDS + "run: {save_steps: 2, save_steps: 3}\n", [AT + "4:22: ", "stands twice"]),
    "flat and sectioned": (HEAD + REWARDS + "algorithm: {beta: 0}\nbeta: 1\n", [AT + "5:1: "]),
    "anchor and alias": (
        HEAD + REWARDS + "run: {run_name: &a x, logging_steps: *a}\n",
        [AT + "4:17: anchors (&a)", AT + "4:38: aliases (*a)"],
    ),
    "alias bomb": (
        HEAD + "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 15)),
        ["aliases", "anchors", "errors"],
    ),
    "tag": (HEAD + "rewards: !!python/object/apply:os.system ['touch canary']\n", [AT + "3:10: YAML tags"]),
    "merge key": (HEAD + REWARDS + "<<: {run: {save_steps: 2}}\n", [AT + "4:1: merge keys"]),
    "two documents": (HEAD + REWARDS + "---\na: 1\n", [AT + "4:1: a second YAML document"]),
    "deep": (HEAD + REWARDS + "run: " + "[" * 5000, ["20 levels"]),
    "a tab": (HEAD + REWARDS + "run:\n\tsave_steps: 2\n", [AT + "5:1: "]),
    "unclosed": (HEAD + REWARDS + "run: {save_steps: 2\n", [AT]),
    "a list": ("- model\n", [AT + "1:1: "]),
    "empty": ("", ["bad.yaml: the recipe is empty"]),
    "larger than 1 MiB": ("# " + "x" * (1 << 20), ["bad.yaml: is larger than 1 MiB"]),
    "a megabyte of errors": (HEAD + "x: y\n" * 150_000, ["more.", "errors"]),
    "NUL": (HEAD + "x: \0\n", ["bad.yaml: is not a text file"]),
    "escape": (HEAD + "x: \x1b[2J\n", [AT + "3:4: a control character"]),
    "UTF-16": ((HEAD + REWARDS).encode("utf-16"), ["bad.yaml: is UTF-16"]),
    "not UTF-8": (HEAD.encode() + b"x: \xff\n", [AT + "3:4: byte 0xff is not UTF-8"]),
    "lone surrogate": (HEAD.encode() + b"x: \xed\xa0\x80\n", [AT + "3:4: byte 0xed is not UTF-8"]),
    "extends itself": (HEAD + REWARDS + "extends: bad.yaml\n", [AT + "4:10: extends: goes round in a circle"]),
    "extends nothing": (HEAD + REWARDS + "extends: none.yaml\n", [AT + "4:10: extends: ", "no such file"]),
    "trust from a file": (HEAD + REWARDS + "trust_remote_code: true\n", [AT + "4:20: ", "--trust-remote-code"]),
    "refused key of TRL": (HEAD + REWARDS + "fp16: true\n", [AT + "4:"]),
    "no such reward": (HEAD + "rewards: [{function: letters.share_of_leters}]\n", [AT + "3:22: rewards[0].function: ", "share_of_letters"]),
    "no such data": (HEAD.replace("prompts", "promts") + REWARDS, [AT + "2:22: data.dataset_name: "]),
}


@fault("E1", "bad recipes of every kind: place, remedy, all errors at once, in bounded memory", quick=True)
def bad_recipes(bench):
    for name, (text, says) in BAD_RECIPES.items():
        bench.write("bad.yaml", text)
        refused(bench, name, code=2, says=says, recipe=Path("bad.yaml"), within=10)
    everything_at_once(bench)
    bench.write("bad.yaml", HEAD + REWARDS)
    for setting in (
        "beta=-1",
        "betta=1",
        "rewards[9].weight=1",
        "beta=&a 1",
        "beta",
        "=",
        "run.save_steps=" + "[" * 100,
        "report_to=\x1b[2J",
    ):
        refused(bench, f"--set {setting!r}", code=2, says=["--set"], settings=[setting], recipe=Path("bad.yaml"), within=10)
    for name, make in {"a folder": os.mkdir, "a pipe": os.mkfifo, "a circle of links": lambda path: path.symlink_to(path)}.items():
        path = bench.root / "odd.yaml"
        make(path)
        refused(bench, name, code=2, says=["odd.yaml: "], recipe=path, within=10)
        path.rmdir() if name == "a folder" else path.unlink()
    refused(bench, "no file", code=2, says=["none.yaml: no such file"], recipe=Path("none.yaml"), within=10)


def everything_at_once(bench):
    text = HEAD + "rewards: []\nalgorithm:\n  betta: 1\n  beta: -1\ntraining:\n  learning_rate: fast\nbeta: &a 1\n"
    bench.write("bad.yaml", text)
    says = [AT + place for place in ("3:10", "5:3", "6:9", "8:18", "9:7")]
    refused(bench, "several at once", code=2, says=[*says, "errors"], recipe=Path("bad.yaml"), within=10)


# --- E2 ----------------------------------------------------------------------------------------------------------------------------


def lines(*rows):
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


GOOD = {"prompt": "Say hello."}
BAD_DATA = {
    "broken line": ("x.jsonl", lines(GOOD, '{"prompt": "a"\n', GOOD), ["x.jsonl:2: not JSON: "]),
    "a list for a row": ("x.jsonl", lines(GOOD, "[1]\n"), ["x.jsonl:2: expected an object with columns, got [1]"]),
    "missing column": ("x.jsonl", lines({"promt": "a"}), ["x.jsonl: no column `prompt`", "Did you mean `data.prompt_column: promt`?"]),
    "empty file": ("x.jsonl", b"", ["x.jsonl: holds no rows"]),
    "blank lines": ("x.jsonl", b"\n\n \n", ["x.jsonl: holds no rows"]),
    "null prompt": ("x.jsonl", lines(GOOD, {"prompt": None}), ["x.jsonl:2: `prompt` is missing or null"]),
    "empty prompt": ("x.jsonl", lines(GOOD, {"prompt": ""}), ["x.jsonl:2: `prompt` is empty"]),
    "a number for a prompt": (
        "x.jsonl",
        lines(GOOD, {"prompt": 3}),
        ["x.jsonl:2: `prompt` expected a string or a list of messages, got 3"],
    ),
    "messages and strings": ("x.jsonl", lines(GOOD, {"prompt": [{"role": "user", "content": "a"}]}), ["x.jsonl:2: `prompt` is messages"]),
    "a message without role": ("x.jsonl", lines({"prompt": [{"content": "a"}]}), ["x.jsonl:1: `prompt` message 0: expected a role"]),
    "prompt of 10 MB": ("x.jsonl", lines(GOOD, {"prompt": "word " * 2_000_000}), ["x.jsonl:2: the prompt has at least "]),
    "beyond the context": ("x.jsonl", lines({"prompt": "a" * 510}), ["x.jsonl:1: the prompt has 510 tokens; 504 is the most"]),
    "name twice": ("x.jsonl", lines(GOOD, '{"prompt": "a", "prompt": "b"}\n'), ["x.jsonl:2: not JSON: the name 'prompt' stands twice"]),
    "infinity": ("x.jsonl", lines({"prompt": "a", "n": float("inf")}), ["x.jsonl:1: not JSON: Infinity is not a JSON number"]),
    "lone surrogate": ("x.jsonl", lines('{"prompt": "\\ud800"}\n'), ["x.jsonl:1: holds half of a surrogate pair"]),
    "deep": ("x.jsonl", lines(GOOD, '{"prompt": ' + "[" * 200_000 + "\n"), ["x.jsonl:2: not JSON: nested too deeply"]),
    "not UTF-8": ("x.jsonl", lines(GOOD).encode() + b'{"prompt": "\xff"}\n', ["x.jsonl:2: not UTF-8: byte 0xff"]),
    "UTF-16": ("x.jsonl", lines(GOOD).encode("utf-16"), ["x.jsonl: UTF-16 text"]),
    "our column": ("x.jsonl", lines(GOOD | {"completions": "a"}), ["x.jsonl: column `completions` has the name of an argument"]),
    "gzip by another name": ("x.jsonl", b"\x1f\x8b\x08" + bytes(100), ["x.jsonl:1: not UTF-8: byte 0x8b"]),
    "array cut off": ("x.json", '[{"prompt": "a"},\n{"prompt": ', ["x.json:2: not JSON: "]),
    "ragged rows": ("x.csv", "prompt,n\na,1\nb,2,3\nc\n", ["x.csv:3: 3 cells where the header has 2", "x.csv:4: 1 cells"]),
    "open quote": ("x.csv", 'prompt,n\na,1\n"b,2\n', ["x.csv:3: not CSV: "]),
    "header twice": ("x.csv", "prompt,prompt\na,b\n", ["x.csv:1: the header names `prompt` twice"]),
    "junk for parquet": ("x.parquet", b"PAR1 junk PAR1", ["x.parquet: not a readable Parquet file"]),
    "many bad rows": ("x.jsonl", lines(*["x\n"] * 200), ["x.jsonl:10: not JSON: ", "… and 190 more rows; 200 in all."]),
}
UNNAMEABLE = {
    "gzip": (lambda path: path.write_bytes(b"\x1f\x8b\x08" + bytes(100)), "x.jsonl.gz", "cannot read .gz"),
    "a folder without data": (lambda path: path.mkdir(), "folder", "holds no data"),
    "a pipe": (os.mkfifo, "pipe.jsonl", "is a pipe or a device"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "zero.jsonl", "is a pipe or a device"),
    "a circle of links": (lambda path: path.symlink_to(path), "circle.jsonl", "no such file or folder"),
}
"""What a name may lead to that is no data set: an error of the recipe."""


@fault("E2", "bad data of every kind: file and line, all of it, before the model is loaded")
def bad_data(bench):
    for name, (file, content, says) in BAD_DATA.items():
        bench.write(file, content)
        refused(bench, name, code=3, says=says, settings=[f"dataset_name={file}"])
    for name, (make, file, told) in UNNAMEABLE.items():
        make(bench.root / file)
        refused(bench, name, code=2, says=[told, file], settings=[f"dataset_name={file}"])
    parquet_of_every_kind(bench)
    files_that_shrink(bench)
    gold_that_cannot_be_parsed(bench)
    what_is_told_and_trained_on(bench)


def parquet_of_every_kind(bench):
    def write():
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"prompt": [str(i) for i in range(5000)]}), bench.root / "whole.parquet")
        zeros = pa.table({"prompt": pa.array(["a" * 1000] * 10_000)})
        with pq.ParquetWriter(bench.root / "bomb.parquet", zeros.schema) as writer:
            for _ in range(100):
                writer.write_table(zeros)

    assert in_child(write) == 0
    whole = (bench.root / "whole.parquet").read_bytes()
    for share in (0, 0.5, 0.99):
        bench.write("cut.parquet", whole[: int(len(whole) * share)])
        refused(bench, f"Parquet cut at {share:.0%}", code=3, says=["cut.parquet: not a readable"], settings=["dataset_name=cut.parquet"])
    for at in range(100, len(whole), len(whole) // 5):
        bench.write("flipped.parquet", whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        outcome = bench.train(settings=["dataset_name=flipped.parquet", "max_steps=1", "save_strategy=no"], inject=limited())
        # Parquet has no checksum of its own: a flipped byte may pass as another prompt. It must never be a traceback or a crash.
        bench.expect("exit code", outcome.code in (0, 3), f"flipped at {at}: {outcome.code}: {outcome.tail()}")
    size = (bench.root / "bomb.parquet").stat().st_size
    bench.expect("bounded time", size < 10 << 20, f"the bomb has {size} bytes itself")
    refused(
        bench, "Parquet bomb", code=3, says=["of memory are free"], settings=["dataset_name=bomb.parquet"], inject=limited(small_memory)
    )


def small_memory():
    from rloo_cli.data import sources

    sources.MEMORY_SHARE = 1e-3


def files_that_shrink(bench):
    bench.write("x.jsonl", lines(*[GOOD | {"n": "x" * 1000}] * 1000))

    def cut_after_the_first_line():
        from rloo_cli.data.text_files import TextFile

        whole = TextFile.lines

        def shrinking(self):
            for number, text in whole(self):
                if number == 1:
                    os.truncate(self.path, 500_000)
                yield number, text

        TextFile.lines = shrinking

    outcome = bench.train(settings=["dataset_name=x.jsonl"], inject=limited(cut_after_the_first_line))
    bench.check(outcome, code=3, says=["x.jsonl:", "not JSON"], within=SOON, lines=3, where="text that shrinks: ")
    bench.expect("nothing left behind", not outcome.folder.exists(), "text that shrinks: the run folder is left")

    def cut_after_the_footer():
        import pyarrow.parquet as pq

        class Shrinking(pq.ParquetFile):
            def iter_batches(self, **kwargs):
                os.truncate("shrinks.parquet", 100)
                return super().iter_batches(**kwargs)

        pq.ParquetFile = Shrinking

    shutil.copy(bench.root / "whole.parquet", bench.root / "shrinks.parquet")
    outcome = bench.train(settings=["dataset_name=shrinks.parquet"], inject=limited(cut_after_the_footer))
    bench.check(outcome, code=3, says=["shrinks.parquet: not a readable"], within=SOON, where="Parquet that shrinks: ")


def gold_that_cannot_be_parsed(bench):
    rows = [GOOD | {"solution": "\\frac{1}{"} if i % 10 == 0 else GOOD | {"solution": "$4$"} for i in range(40)]
    bench.write("x.jsonl", lines(*rows))
    settings = ["dataset_name=x.jsonl", "rewards=[{function: accuracy_reward}]"]
    refused(bench, "gold that cannot be parsed", code=3, says=["4 of 40"], settings=settings, inject=lambda: None)


def what_is_told_and_trained_on(bench):
    settings = ["dataset_name=x.jsonl", "max_steps=1", "save_strategy=no"]
    bench.write("x.jsonl", b"\xef\xbb\xbf" + lines(GOOD, {"prompt": "Two?"}, GOOD).encode())
    outcome = bench.train(settings=settings, inject=limited())
    says = ["x.jsonl: 1 of 3 prompts repeat an earlier one (x.jsonl:3 that of x.jsonl:1); each row is trained on."]
    bench.check(outcome, code=0, says=says, where="byte-order mark and duplicates: ")
    good = bench.train()
    bench.check(good, code=0, where="good data: ")
    bench.is_gold(good.folder)


# --- E4 ----------------------------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes the canary."""

    def __reduce__(self):
        return os.system, (f"touch {CANARY}",)


def changed(name, **values):
    """Set values of a JSON file of the folder."""

    def change(folder):
        document = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(document | values))

    return change


def written(name, content):
    def write(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    return write


def pickles_only(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Bomb()}))


def pickles_in_an_index(folder):
    pickles_only(folder)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": "pytorch_model.bin"}}))


def code_beside(name, **auto_map):
    def write(folder):
        (folder / "evil.py").write_text(f"open({CANARY!r}, 'w')\nclass C: pass\n")
        changed(name, auto_map=auto_map)(folder)

    return write


def header(length, rest=b""):
    def write(folder):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + rest)

    return write


def cut(share):
    def write(folder):
        path = folder / "model.safetensors"
        os.truncate(path, int(path.stat().st_size * share))

    return write


def index(weight_map):
    def write(folder):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return write


def gigabyte(name):
    def write(folder):
        (folder / name).touch()
        os.truncate(folder / name, 1 << 30)

    return write


def without(name):
    return lambda folder: (folder / name).unlink()


def without_a_weight(folder):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BAD_MODELS = {
    "pickled weights": (pickles_only, ["only pytorch_model.bin, which is a pickle"]),
    "pickled shards": (pickles_in_an_index, ["which is a pickle"]),
    "a pickle by another name": (written("model.safetensors", pickle.dumps(Bomb())), ["model.safetensors: is damaged or cut off"]),
    "no weights": (without("model.safetensors"), ["holds no weights"]),
    "code for the configuration": (code_beside("config.json", AutoConfig="evil.C", AutoModelForCausalLM="evil.C"), ["--trust-remote-code"]),
    "code for the tokenizer": (code_beside("tokenizer_config.json", AutoTokenizer=["evil.C", None]), ["--trust-remote-code"]),
    "header of 4 EiB": (header(1 << 62), ["model.safetensors: is damaged or cut off"]),
    "header of 99 MB in 16 bytes": (header(99_000_000, b"{}      "), ["is damaged or cut off"]),
    "header that is a list": (header(2, b"[]"), ["is damaged or cut off"]),
    "empty weights": (cut(0), ["is damaged or cut off"]),
    "half of the weights": (cut(0.5), ["is damaged or cut off"]),
    "one weight missing": (without_a_weight, ["lack 1 of the model's weights, such as model.norm.weight"]),
    "a shard missing": (index({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}), ["missing"]),
    "index out of the folder": (index({"a": "../../etc/x.safetensors"}), ["a shard is a .safetensors file of the same folder"]),
    "index with a pickle": (index({"a": "pytorch_model.bin"}), ["a shard is a .safetensors file of the same folder"]),
    "index that is a list": (written("model.safetensors.index.json", []), ["expected an object, got []"]),
    "no tokenizer": (without("tokenizer.json"), ["has no tokenizer"]),
    "tokenizer.json of 1 GB": (gigabyte("tokenizer.json"), ["tokenizer.json: has 1,073,741,824 bytes"]),
    "tokenizer.json that is text": (written("tokenizer.json", b"garbage"), ["model.model_name_or_path: "]),
    "tokenizer.json of another shape": (
        written("tokenizer.json", {"model": {"type": "BPE", "vocab": [], "merges": 3}}),
        ["model.model_name"],
    ),
    "tokens beyond the vocabulary": (changed("config.json", vocab_size=50), ["has 50 tokens: they do not belong together"]),
    "config.json that is a list": (written("config.json", []), ["config.json: expected an object, got []"]),
    "config.json of 1 GB": (gigabyte("config.json"), ["config.json: has 1,073,741,824 bytes"]),
    "config.json, deep": (written("config.json", b"[" * 200_000), ["config.json: is nested too deeply"]),
    "10^9 layers": (changed("config.json", num_hidden_layers=10**9), ["`num_hidden_layers` is 1000000000"]),
    "10^9 labels": (changed("config.json", num_labels=10**9), ["`num_labels` is 1000000000"]),
    "width of 10^7": (changed("config.json", hidden_size=10**7, intermediate_size=10**7), ["GiB of weights; this machine has"]),
    "0 heads": (changed("config.json", num_attention_heads=0), ["model.model_name_or_path: "]),
    "no model_type": (written("config.json", {"vocab_size": 3}), ["model.model_name_or_path: "]),
    "unknown model_type": (changed("config.json", model_type="evil"), ["model.model_name_or_path: "]),
    "wrong kinds": (changed("config.json", hidden_size="wide", rope_parameters=[1]), ["model.model_name_or_path: "]),
    "generation_config.json that is text": (written("generation_config.json", b"garbage"), ["generation_config.json: is not JSON"]),
    "generation_config.json, wrong end": (
        changed("generation_config.json", eos_token_id=["x"]),
        ["generation_config.json: `eos_token_id`"],
    ),
    "generation_config.json, wrong kinds": (changed("generation_config.json", watermarking_config="x"), ["model.model_name_or_path: "]),
}
LOADING = ("one weight missing", "width of 10^7", "0 heads", "wrong kinds", "generation_config.json, wrong kinds")
"""Found as the model is built, before its weights take memory; the others are found before."""

TEMPLATES = {
    "endless": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", 3, "does it loop?"),
    "endless in C": ("{{ (7 ** 9999999) % 3 }}{{ (7 ** 99999999) % 3 }}", 3, "x.jsonl"),
    "endless by a pattern": ("{{ 9 ** 9 ** 9 ** 9 }}", 3, "x.jsonl"),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", 3, "x.jsonl:1: the chat template failed: "),
    "memory": ("{{ 'a' * 9999999999 }}", 3, "x.jsonl:1: the chat template failed: "),
    "memory, bit by bit": (
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        3,
        "x.jsonl",
    ),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 3, "x.jsonl:1: the chat template failed: "),
    "globals": ("{{ cycler.__init__.__globals__.os.system('touch canary') }}", 3, "x.jsonl:1: the chat template failed: "),
    "globals by a filter": (
        "{{ (lipsum | attr('__globals__'))['os'].system('touch canary') }}",
        3,
        "x.jsonl:1: the chat template failed: ",
    ),
    "include": ("{% include '/etc/passwd' %}", 3, "x.jsonl:1: the chat template failed: "),
    "import": ("{% import 'os' as os %}{{ os.system('touch canary') }}", 3, "x.jsonl:1: the chat template failed: "),
    "its own refusal": ("{{ raise_exception('no system role') }}", 3, "no system role"),
    "no Jinja": ("{% for %}", 2, "cannot be read"),
    "of 2 MiB": ("x" * (2 << 20), 2, "chat_template.jinja: has 2,097,152 bytes"),
}


@fault("E4", "model folders that lie: pickles, code, headers, sizes, hostile chat templates")
def bad_model_folders(bench):
    assert in_child(functools.partial(write_model, bench.root / "sound")) == 0
    folder = bench.root / "evil"
    settings = ["model_name_or_path=evil", "random_weights=false"]
    for name, (damage, says) in BAD_MODELS.items():
        shutil.copytree(bench.root / "sound", folder)
        damage(folder)
        refused(bench, name, code=2, says=says, settings=settings, loads=name in LOADING)
        shutil.rmtree(folder)
    bench.write("x.jsonl", lines({"prompt": [{"role": "user", "content": "hi"}]}))
    for name, (template, code, told) in TEMPLATES.items():
        shutil.copytree(bench.root / "sound", folder)
        (folder / "chat_template.jinja").write_text(template)
        refused(bench, f"template: {name}", code=code, says=[told], settings=[*settings, "dataset_name=x.jsonl"])
        shutil.rmtree(folder)
    shutil.copytree(bench.root / "sound", folder)
    outcome = bench.train(settings=[*settings, "dataset_name=prompts.jsonl", "max_steps=1"], inject=limited())
    bench.check(outcome, code=0, where="a sound folder: ")


def write_model(folder):
    import tiny

    tiny.qwen2().save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
