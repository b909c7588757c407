"""Completions of prompts that somebody types, by what a run has trained or by any model. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rloo_cli.data.adapter_folder import base_of, is_adapter
from rloo_cli.errors import RecipeError, RefusedError
from rloo_cli.plan.shipped import find_recipe
from rloo_cli.recipe.load import load_recipe
from rloo_cli.recipe.schema import ModelSection, Recipe
from rloo_cli.run.checkpoint import Checkpoint, find_checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.manifest import DamagedError, Manifest
from rloo_cli.types import PromptContent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rloo_cli.rollout.engine import SamplingParams

MODEL_FIELD = "model.model_name_or_path: "
PLAIN_LENGTH = 256
"""Tokens of a completion where neither a recipe nor the command line says how many."""
STREAM = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose completions are asked for."""

    words: str
    """`the final model of runs/x`."""
    model: ModelSection
    checkpoint: Checkpoint | None = None
    """Whose weights replace those of the model."""
    recipe: Recipe | None = None
    """With which it was trained, or is to be; None for a plain model."""
    run: RunFolder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A completion. Example: `Written(text="42", text_with_special="42<|im_end|>", tokens=2, finish_reason="stopped", logprob=-0.1)`."""

    text: str
    text_with_special: str
    tokens: int
    finish_reason: str
    logprob: float
    """Of all its tokens together, nats, as they were drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt and its completions."""

    prompt: PromptContent
    prompt_text: str
    """As the model saw it."""
    prompt_tokens: int
    completions: tuple[Written, ...]


def choose_subject(name: str, *, checkpoint: str | None) -> Subject:
    """Whom `rloo generate NAME` means: a run (its final model, else its latest checkpoint), a checkpoint, a model's folder, a recipe's
    model as it is, or a model on the hub.

    Raises:
        RefusedError, RecipeError, StorageError: there is no such thing, or it is damaged.
    """
    path = Path(name).expanduser()
    if path.is_dir() and (path / "recipe.yaml").is_file():
        return _of_run(RunFolder(path), checkpoint)
    if checkpoint is not None:
        raise RefusedError(f"--checkpoint needs a run folder, and {name} is none (it has no recipe.yaml).")
    if path.is_dir():
        return _of_folder(path)
    if (file := find_recipe(name)).is_file():
        recipe = load_recipe(file).recipe
        return Subject(words=f"the model of {file}", model=recipe.model, recipe=recipe)
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise RefusedError(f"{name}: no such run, checkpoint or model folder.")
    return Subject(words=name, model=ModelSection(model_name_or_path=name))


def _of_run(folder: RunFolder, checkpoint: str | None) -> Subject:
    recipe = _readable_recipe(folder.recipe)
    if checkpoint is None and folder.finished_step() is not None:
        return Subject(words=f"the final model of {folder.path}", model=_local(folder.final), recipe=recipe, run=folder)
    if checkpoint is not None and not checkpoint.isdecimal() and checkpoint != "latest":
        raise RefusedError(f"--checkpoint {checkpoint}: a step number is wanted, or `latest`.")
    found = find_checkpoint(folder.checkpoints, int(checkpoint) if checkpoint and checkpoint.isdecimal() else "latest")
    if found is None:
        raise RefusedError(f"{folder.path} holds neither a final model nor a checkpoint yet.")
    return _of_checkpoint(found, folder)


def _of_folder(path: Path) -> Subject:
    try:
        kind = Manifest.read(path).info.get("kind")
    except DamagedError:
        kind = None
    folder = path.absolute().parent
    if kind == "checkpoint":
        found = find_checkpoint(folder, path)
        assert found is not None  # a path that is not there is refused
        return _of_checkpoint(found, RunFolder(folder.parent))
    if not ((path / "config.json").is_file() or is_adapter(path)):
        raise RefusedError(f"{path} is no run (no recipe.yaml), no checkpoint (no manifest.json of one) and no model (no config.json).")
    recipe = _readable_recipe(folder / "recipe.yaml") if kind == "final" else None
    return Subject(words=str(path), model=_local(path), recipe=recipe, run=RunFolder(folder) if recipe is not None else None)


def _of_checkpoint(checkpoint: Checkpoint, folder: RunFolder) -> Subject:
    try:
        recipe = Recipe.model_validate_json(json.dumps(checkpoint.load_document("recipe")))
    except ValidationError as error:
        raise RefusedError(f"checkpoint {checkpoint.path} comes from another version of rloo: this one cannot read its recipe.") from error
    return Subject(words=f"step {checkpoint.step} of {folder.path}", model=recipe.model, checkpoint=checkpoint, recipe=recipe, run=folder)


def _readable_recipe(path: Path) -> Recipe | None:
    try:
        return load_recipe(path).recipe
    except RecipeError:
        return None


def _local(path: Path) -> ModelSection:
    return ModelSection(model_name_or_path=str(path.resolve()), use_peft=is_adapter(path))


class Speaker:
    """A model that is loaded and answers prompts; turn after turn it draws other numbers.

    Raises:
        RefusedError, RecipeError, NonFiniteError: the model or its tokenizer cannot be loaded.
    """

    def __init__(self, subject: Subject, *, seed: int, trust_remote_code: bool) -> None:
        import transformers  # noqa: F401 - so that it can be told to be quiet

        from rloo_cli.rollout.transformers_engine import TransformersEngine
        from rloo_cli.run.logs import quiet_libraries

        quiet_libraries()
        self._recipe, self._seed, self._turn = subject.recipe, seed, 0
        try:
            self._tokenizer, model = _load(subject, trust_remote_code=trust_remote_code)
        except RecipeError as error:
            raise RefusedError(error.message.removeprefix(MODEL_FIELD)) from error
        self._vocabulary = model.get_input_embeddings().num_embeddings
        # Shared prompts pay for large batches, and finding out whether a model takes them costs more than an answer.
        self._engine = TransformersEngine(model, tokenizer=self._tokenizer, layout="plain")

    @property
    def has_template(self) -> bool:
        """Whether its tokenizer knows how a conversation is written."""
        return bool(self._tokenizer.chat_template)

    def params(self) -> SamplingParams:
        """How the run drew completions; for a plain model temperature 1 and nothing else."""
        from rloo_cli.rollout.engine import SamplingParams
        from rloo_cli.training.sampling import training_params

        return training_params(self._recipe) if self._recipe is not None else SamplingParams(max_new_tokens=PLAIN_LENGTH)

    def answer(self, prompts: Sequence[PromptContent], params: SamplingParams, count: int) -> list[Answer]:
        """`count` completions of each prompt.

        Raises:
            RefusedError, RecipeError, DataError: a prompt cannot be written as the model takes it.
            EngineError, NonFiniteError: the model does not generate.
        """
        from rloo_cli.rollout.engine import GenerationRequest, RandomKey

        texts = [self._render(prompt) for prompt in prompts]
        ids = [self._encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        requests = [GenerationRequest(token_ids=each, num_generations=count, first_row=i * count) for i, each in enumerate(ids)]
        found = self._engine.generate(requests, params, RandomKey(seed=self._seed, step=self._turn, stream=STREAM))
        self._turn += 1
        return [
            Answer(prompt=prompt, prompt_text=text, prompt_tokens=len(each), completions=tuple(map(self._written, group)))
            for prompt, text, each, group in zip(prompts, texts, ids, found, strict=True)
        ]

    def _render(self, prompt: PromptContent) -> str:
        from rloo_cli.data.chat import render_prompt
        from rloo_cli.data.multimodal import in_parts
        from rloo_cli.rollout.visual import reads_images

        if not isinstance(prompt, str) and reads_images(self._engine.model):
            prompt = in_parts(prompt, 0)  # as training writes them: templates of such models go through the parts
        kwargs = self._recipe.data.chat_template_kwargs if self._recipe is not None else {}
        return render_prompt(prompt, tokenizer=self._tokenizer, template_kwargs=kwargs)

    def _encode(self, prompt: PromptContent, text: str) -> tuple[int, ...]:
        from rloo_cli.data.encoding import encode_texts

        (ids,) = encode_texts([text], tokenizer=self._tokenizer, is_templated=not isinstance(prompt, str))
        if not ids:
            raise RefusedError("a prompt is empty: it has no tokens to go on from.")
        if max(ids) >= self._vocabulary:
            raise RefusedError(
                f"the tokenizer gives token id {max(ids):,}, and the model has {self._vocabulary:,}: they do not belong together."
            )
        return tuple(ids)

    def _written(self, completion: Any) -> Written:
        return Written(
            text=self._tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            text_with_special=self._tokenizer.decode(completion.token_ids, skip_special_tokens=False),
            tokens=len(completion.token_ids),
            finish_reason=str(completion.finish_reason),
            logprob=sum(completion.logprobs),
        )


def _load(subject: Subject, *, trust_remote_code: bool) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model, on the GPU where there is one, with the checkpoint's weights."""
    import torch

    from rloo_cli.data.chat import load_tokenizer
    from rloo_cli.data.model_folder import check_weights
    from rloo_cli.training.adapter import add_adapter
    from rloo_cli.training.policy import load_model

    tokenizer = load_tokenizer(subject.model, trust_remote_code=trust_remote_code)
    check_weights(base_of(subject.model))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Nothing is trained here: on a GPU bfloat16 is how runs sample, half the memory and as good.
    is_low = device.type == "cuda" and (subject.recipe is None or subject.recipe.training.bf16)
    seed = subject.recipe.training.seed if subject.recipe is not None else 0
    model = load_model(subject.model, seed=seed, trust_remote_code=trust_remote_code)
    if subject.model.use_peft:
        add_adapter(model, subject.model, seed=seed)
    if subject.checkpoint is not None:
        _put_weights(model, subject.checkpoint)
    return tokenizer, model.to(device, torch.bfloat16 if is_low else model.dtype)


def _put_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's tensors into the model, one at a time.

    Raises:
        RefusedError: one is not the model's.
        StorageError: they cannot be read.
    """
    import torch

    saved, own = checkpoint.saved_tensors("model"), model.state_dict()
    with torch.no_grad():
        for name in saved.names:
            if name not in own or tuple(own[name].shape) != saved.shape(name):
                raise RefusedError(f"checkpoint {checkpoint.path} is of another model: {name} is not one of its tensors.")
            own[name].copy_(saved.whole(name))


def with_options(params: SamplingParams, **given: Any) -> SamplingParams:
    """The parameters with those that were given; None = not given."""
    return replace(params, **{name: value for name, value in given.items() if value is not None})
