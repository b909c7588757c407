"""`RLOOTrainer`: what it is given becomes a recipe, and that is trained as `rloo train` trains one."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rloo_cli.api.config import RLOOConfig
from rloo_cli.api.functions import Rewards, rewards_of
from rloo_cli.api.inputs import Inputs, as_dataset, own_template, with_model
from rloo_cli.api.output import TrainerState, TrainOutput, read_output, read_state
from rloo_cli.api.plain import CONFIG, plain
from rloo_cli.api.session import alone, environment_kept, in_python, leave_of_program, next_place, outside_of_loops, program
from rloo_cli.errors import RecipeError, RefusedError
from rloo_cli.launch.cluster import MachineOptions
from rloo_cli.launch.export import refuse_occupied
from rloo_cli.launch.first_start import WRONG_BEFORE_TRAINING
from rloo_cli.launch.given import Place, failure_told, place_of, refuse_other_number, train_as_told
from rloo_cli.launch.hub import check_hub, is_missing_there, upload_final
from rloo_cli.launch.launcher import launcher_of
from rloo_cli.launch.local import nothing_left
from rloo_cli.launch.target import Target, choose_target
from rloo_cli.plan.extras import check_deepspeed
from rloo_cli.plan.prepare import CheckedRecipe, check_recipe
from rloo_cli.recipe.dump import dump_document
from rloo_cli.rewards.given import given
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.manifest import MANIFEST_NAME
from rloo_cli.trl_import.objects import lora_fields

NOT_OFFERED: Mapping[str, str] = {
    "callbacks": "metrics.jsonl and trackers have every step, and a reward function can log through `log_metric`",
    "optimizers": "`optim`, `learning_rate` and `lr_scheduler_type` choose them",
    "quantization_config": "`load_in_4bit` and the fields beside it say it, where there is a GPU",
    "reward_processing_classes": "a reward model is named, and its own tokenizer read",
}
"""Arguments of TRL's trainer that are refused where they are given → what stands in their place."""


class RLOOTrainer:
    """Trains a model by RLOO, as the recipe that its arguments come to.

    Nothing is read or trained before `train`. Errors are those of `rloo_cli.errors`, each a line that says what to do.

    Example:
        trainer = RLOOTrainer(
            model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=accuracy_reward, train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train")
        )
        trainer.train()
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        """Take what there is to train; see docs/python.md for each.

        Args:
            model: hub id or folder, or a model of transformers, which is copied into the run's folder and stays as it is.
            reward_funcs: a function, or a list of functions, names and entries; None = `rewards` of the config.
            args: the config; None = every default.
            train_dataset: a `datasets.Dataset`, a list of rows, or a name; None = `dataset_name` of the config.
            eval_dataset: rows of the same kind; None = `dataset_test_split` of the config.
            processing_class: the model's tokenizer or processor.
            peft_config: a LoraConfig of peft.
            others: arguments of TRL's trainer that are not offered.

        Raises:
            RecipeError: an argument that cannot be used.
            RefusedError: one that is not offered.
        """
        _refuse_others(others)
        if args is not None and not isinstance(args, RLOOConfig):
            raise RecipeError(f"args: {type(args).__module__}.{type(args).__name__} is not rloo_cli.RLOOConfig.")
        self.args = args if args is not None else RLOOConfig()
        self._code_dir, self._program = program()
        self._rewards = self._rewards_of(reward_funcs)
        self._inputs, self._fields = self._taken(model, train_dataset, eval_dataset, processing_class)
        self._fields |= _peft(peft_config)
        self._folder: RunFolder | None = None

    def train(self, resume_from_checkpoint: bool | int | str | os.PathLike[str] | None = None, *, quiet: bool = False) -> TrainOutput:
        """Train to the end; the run's folder holds what `rloo train` leaves.

        Args:
            resume_from_checkpoint: True = go on from the latest checkpoint in output_dir; a step; or a checkpoint's folder.
            quiet: whether nothing is printed but errors.

        Raises:
            RefusedError: another training is under way in this process, or output_dir is not what it has to be.
            StoppedError: a signal, Ctrl-C among them, came; a checkpoint is saved.
            RlooError: each kind as the command line has it.
        """
        with alone(), environment_kept(), outside_of_loops(), in_python(), given(self._rewards.functions):
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see cli/app.py; too late where torch is loaded, and harmless
            return read_output(self._train(_resume_text(resume_from_checkpoint), quiet=quiet))

    @property
    def state(self) -> TrainerState:
        """The last training's step and rows of metrics."""
        return read_state(self._folder)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> Path:
        """The folder of the trained model: a copy at `output_dir`, or final/ of the run itself.

        Raises:
            RefusedError: nothing was trained yet, or something is at `output_dir`.
        """
        if self._folder is None or self._folder.finished_step() is None:
            raise RefusedError("there is no trained model to save yet: call train() first.")
        if output_dir is None:
            return self._folder.final
        target = Path(output_dir)
        place = place_of(os.environ)
        if place is None or place.rank == 0:
            _copy(self._folder.final, target)
        return target

    # --- what was given ----------------------------------------------------------------------------------------------------------

    def _rewards_of(self, reward_funcs: Any) -> Rewards:
        if reward_funcs is not None:
            weights = self.args.given.get("reward_weights")
            return rewards_of(reward_funcs, weights, code_dir=self._code_dir)
        named = self.args.given.get("rewards") or self.args.given.get("reward_funcs")
        if not named:
            raise RecipeError(f"{CONFIG}: reward_funcs: at least one reward function is needed.")
        return rewards_of(named, self.args.given.get("reward_weights"), code_dir=self._code_dir)

    def _taken(self, model: Any, train: Any, test: Any, tokenizer: Any) -> tuple[Inputs, dict[str, Any]]:
        """(what is given as objects, the fields for what is given by name)."""
        fields: dict[str, Any] = {}
        if isinstance(model, str | os.PathLike):
            fields["model_name_or_path"] = os.fspath(model)
        if isinstance(train, str | os.PathLike):
            fields["dataset_name"] = os.fspath(train)
            train = None
        self._refuse_twice(fields, model=model, train=train)
        inputs = Inputs(train=as_dataset("train_dataset", train), test=as_dataset("eval_dataset", test))
        if inputs.test is not None and inputs.train is None:
            raise RecipeError(f"{CONFIG}: eval_dataset: with a train_dataset that is named, its split is named, too: `dataset_test_split`.")
        name = fields.get("model_name_or_path") or (self.args.model_name_or_path if model is None else None)
        if name is None and model is not None:
            model, tokenizer = with_model(model, tokenizer)
            return replace(inputs, model=model, tokenizer=tokenizer), fields
        if tokenizer is not None and name is not None:
            tokenizer = own_template(name, tokenizer, trust_remote_code=self.args.trust_remote_code)
        return replace(inputs, tokenizer=tokenizer), fields

    def _refuse_twice(self, fields: Mapping[str, Any], *, model: Any, train: Any) -> None:
        both = {"model_name_or_path": model is not None, "dataset_name": train is not None or "dataset_name" in fields}
        for name, is_here in both.items():
            if is_here and self.args.is_given(name):
                raise RecipeError(f"{CONFIG}: {name}: given twice, to the trainer and in its config. Keep one.")
            if not is_here and not self.args.is_given(name) and not (name == "dataset_name" and self.args.given.get("datasets")):
                argument = "model" if name == "model_name_or_path" else "train_dataset"
                raise RecipeError(f"{argument}: required: give it to the trainer, or `{name}` to its config.")

    # --- training ----------------------------------------------------------------------------------------------------------------

    def _train(self, resume: str | None, *, quiet: bool) -> RunFolder:
        place = next_place()
        if place is not None and place.rank > 0:
            self._folder = train_as_told(place) or self._folder or RunFolder(Path(self.args.output_dir or "."))
            return self._folder
        with failure_told(place):
            target = choose_target(
                recipe_name=self._program, output_dir=self.args.output_dir, resume=resume, now=datetime.now().astimezone()
            )
            self._folder = target.folder
            with self._inputs_kept(target):
                checked = self._checked(target.folder, place)
                if target.finished and nothing_left(checked, target.folder):
                    if place is not None:
                        place.tell_nothing()
                    if is_missing_there(checked.loaded.recipe.run, target.folder):
                        check_hub(checked.loaded, target.folder)
                        _upload(checked, target.folder)
                    return target.folder
                away = check_hub(checked.loaded, target.folder)
                if not quiet:
                    self._tell(checked, *([away] if away else []))
                train = launcher_of(checked, place)
                train(checked, target, trust_remote_code=self.args.trust_remote_code, quiet=quiet, leave=leave_of_program())
                if checked.loaded.recipe.run.push_to_hub:
                    _upload(checked, target.folder)
        return target.folder

    def _checked(self, folder: RunFolder, place: Place | None) -> CheckedRecipe:
        document = {name: value for name, value in self.args.given.items() if name not in ("reward_funcs", "reward_weights")}
        document |= {**self._fields, **self._inputs.fields(folder), "rewards": self._rewards.entries}
        is_counted = self.args.is_given("num_processes")  # else this process alone, whatever GPUs there are: it is the user's own program
        checked = check_recipe(
            Path.cwd() / CONFIG,
            text=dump_document(document),
            code_dir=self._code_dir,
            num_processes=place.world_size if place is not None else None if is_counted else 1,
            num_machines=place.num_machines if place is not None else None,
            is_training=True,
        )
        check_deepspeed(checked.loaded.distribution)
        if place is not None:
            refuse_other_number(place, checked, MachineOptions())
        elif checked.loaded.num_processes > 1 and self._rewards.functions:
            raise RefusedError(
                f"num_processes: {checked.loaded.num_processes} processes cannot be started with the reward function "
                f"`{next(iter(self._rewards.functions))}`, which this one alone has: write it into a module, or start the program by "
                "`accelerate launch`."
            )
        return checked

    @contextlib.contextmanager
    def _inputs_kept(self, target: Target) -> Iterator[None]:
        """Keeps for the run what was given as objects; of a run that goes wrong before it begins, nothing stays."""
        folder, is_new_path = target.folder, not target.folder.path.exists()
        is_begun = folder.recipe.is_file()
        if self._inputs.is_any:
            if is_begun:
                self._inputs.refuse_other(folder)
            else:
                self._inputs.keep(folder)
        try:
            yield
        except WRONG_BEFORE_TRAINING:
            if not is_begun and not folder.recipe.is_file() and folder.inputs.exists():
                atomic.remove_tree(folder.inputs)
            if is_new_path:
                atomic.remove_if_empty(folder.path)
            raise

    def _tell(self, checked: CheckedRecipe, *notices: str) -> None:
        said = [*checked.loaded.notices, *notices, *([self._rewards.notice] if self._rewards.notice else [])]
        if self._inputs.model is not None:
            said.append("model: a copy of the object is trained, in the run's folder; the object stays as it is.")
        for notice in said:
            print(f"note: {notice}", file=sys.stderr)


def _upload(checked: CheckedRecipe, folder: RunFolder) -> None:
    """Bring the final model to the hub, and say what came of it."""
    print(upload_final(checked.loaded.recipe.run, folder).line, file=sys.stderr)


def _refuse_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in NOT_OFFERED:
            raise TypeError(f"RLOOTrainer takes no argument `{name}`")
        if value is not None and value != (None, None) and value != []:
            raise RefusedError(f"{name}: not offered: {NOT_OFFERED[name]}.")


def _peft(config: Any) -> dict[str, Any]:
    """The fields that a peft config says: those of its arguments that were given."""
    if config is None:
        return {}
    if type(config).__name__ != "LoraConfig":
        raise RefusedError(f"peft_config: {type(config).__name__} is not offered; LoraConfig of peft is.")
    fresh = type(config)().to_dict()
    stated = {name: plain(name, value) for name, value in config.to_dict().items() if value != fresh.get(name)}
    fields, faults = lora_fields(stated)
    if faults:
        raise RecipeError("\n".join(faults))
    return fields


def _resume_text(resume: bool | int | str | os.PathLike[str] | None) -> str | None:
    if resume is None or resume is False:
        return None
    if resume is True:
        return "latest"
    with contextlib.suppress(TypeError):
        return str(operator.index(resume))  # type: ignore[arg-type]  # numpy's whole numbers, too
    if isinstance(resume, str | os.PathLike) and isinstance(path := os.fspath(resume), str):
        return path
    raise RecipeError(f"resume_from_checkpoint: expected true, a step or a checkpoint's folder, got {resume!r}.")


def _copy(source: Path, target: Path) -> None:
    """Copy a final model, complete or not at all."""
    refuse_occupied(target)
    with atomic.AtomicFolder(target, info={"kind": "export", "from": str(source)}, replace=True) as files:
        for file in sorted(source.rglob("*")):
            name = file.relative_to(source).as_posix()
            if file.is_file() and name != MANIFEST_NAME:
                atomic.make_folder((files.path / name).parent)
                with file.open("rb") as stream:
                    files.write(name, iter(lambda stream=stream: stream.read(1 << 24), b""))  # type: ignore[misc]


__all__ = ["RLOOTrainer"]
