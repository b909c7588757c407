"""Scores conversations by a sequence-classification model: a frozen copy in this process, whatever the trained model lies over.

A row's score is that of a forward pass over the row alone, whatever is beside it in a batch. Three things see to that: rows are padded on
the right below an attention mask; a decoder's head reads the last token that is not the configuration's pad token, so that very token pads;
and where the configuration names none, the last token is read, so a token pads that ends no row of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from rloo_cli.data.chat import load_tokenizer, render_prompts
from rloo_cli.data.encoding import encode_texts
from rloo_cli.data.model_folder import check_weights, model_errors, reason_of
from rloo_cli.data.rendering import RenderFailure
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection, RewardEntry
from rloo_cli.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOGGER = logging.getLogger(__name__)
NO_LIMIT = 1 << 30
"""Tokens; a tokenizer that knows no limit says more."""
OF_THE_POLICY = "model.model_name_or_path"
"""How the checks of a model's files name the field."""


class SequenceScorer:
    """A reward model, opened: configuration and tokenizer are there; `load` brings the weights."""

    def __init__(
        self,
        entry: RewardEntry,
        *,
        name: str,
        field: str,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None,
        template_kwargs: Mapping[str, Any],
        trust_remote_code: bool,
    ) -> None:
        self.entry = entry
        self.name = name
        self.field = field
        self.config = config
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._template_kwargs = template_kwargs
        self._trust_remote_code = trust_remote_code
        self._own_pad: int | None = config.get_text_config().pad_token_id
        self._model: PreTrainedModel | None = None
        self._has_warned = False

    def load(self) -> None:
        """Read the weights onto the device, once; no random number of the run is drawn.

        Raises:
            RecipeError: they cannot be read, are not all there, or are not those of one score.
        """
        if self._model is None:
            with torch.random.fork_rng(devices=[]):
                model = _load_model(self.entry, self.config, self.field, trust_remote_code=self._trust_remote_code)
            self._model = model.to(_device(self.entry)).eval().requires_grad_(False)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Callable[[str, float], None]) -> list[float]:
        """The score of each completion of its prompt. Raises ValueError for what is no text, or has no tokens."""
        rows = encode_texts(self._texts(prompts, completions), tokenizer=self.tokenizer, is_templated=True)
        if not all(rows):
            raise ValueError("a prompt and its completion have no tokens in the reward model's vocabulary")
        cut = [self._cut(ids) for ids in rows]
        log_metric(f"{self.name}/truncated", self._share_cut(rows))
        return self.scores(cut)

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The score of each row of token ids; rows of about equal length are scored together."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        found = [0.0] * len(rows)
        for start in range(0, len(order), self.entry.batch_size):
            chosen = order[start : start + self.entry.batch_size]
            for i, score in zip(chosen, self._forward([rows[i] for i in chosen]), strict=True):
                found[i] = score
        return found

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        assert self._model is not None, "load() comes first"
        device, width = self._model.device, max(map(len, rows))
        pad = self._own_pad if self._own_pad is not None else min(set(range(len(rows) + 1)) - {row[-1] for row in rows})
        ids_BL = torch.full((len(rows), width), pad)
        mask_BL = torch.zeros_like(ids_BL)
        for i, row in enumerate(rows):
            ids_BL[i, : len(row)] = torch.tensor(row)
            mask_BL[i, : len(row)] = 1
        self._model.config.get_text_config().pad_token_id = pad
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            logits = self._model(input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device)).logits
        return logits[:, 0].float().tolist()

    def _texts(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[str]:
        """What the model reads: a string prompt with its completion, or the whole conversation by the model's own template."""
        if all(isinstance(prompt, str) for prompt in prompts):
            return [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        conversations = [_conversation(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        texts = []
        for text in render_prompts(conversations, tokenizer=self.tokenizer, template_kwargs=self._template_kwargs, are_whole=True):
            if isinstance(text, RenderFailure):
                raise ValueError(f"the reward model's chat template failed: {text.reason}")
            texts.append(text)
        return texts

    def _cut(self, ids: Sequence[int]) -> Sequence[int]:
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        return ids[-self.max_length :] if self.tokenizer.truncation_side == "left" else ids[: self.max_length]

    def _share_cut(self, rows: Sequence[Sequence[int]]) -> float:
        """The share of rows that are longer than the model reads; of the first such, a warning tells."""
        cut = sum(self.max_length is not None and len(ids) > self.max_length for ids in rows)
        if cut and not self._has_warned:
            self._has_warned = True
            side = "beginning" if self.tokenizer.truncation_side == "left" else "end"
            LOGGER.warning(
                "reward `%s`: %d of %d rows are longer than the %d tokens that the model reads, the longest has %d; their %s is cut off. "
                "Told once; custom/%s/truncated is their share.",
                *(self.name, cut, len(rows), self.max_length, max(map(len, rows)), side, self.name),
            )
        return cut / len(rows)


def open_reward_model(
    entry: RewardEntry, name: str, field: str, *, template_kwargs: Mapping[str, Any], trust_remote_code: bool
) -> SequenceScorer:
    """The reward model of an entry, its configuration, tokenizer and the headers of its files looked at, no weights read.

    Raises:
        RecipeError: there is no such model, it gives more than one score, or its files cannot be what they are called.
    """
    assert entry.model is not None
    section = ModelSection(model_name_or_path=entry.model, model_revision=entry.revision)
    try:
        tokenizer = load_tokenizer(section, trust_remote_code=trust_remote_code)
        check_weights(section)
    except RecipeError as error:
        raise RecipeError(error.message.replace(OF_THE_POLICY, field, 1)) from error
    config = _read_config(entry, field, trust_remote_code=trust_remote_code)
    return SequenceScorer(
        entry,
        name=name,
        field=field,
        config=config,
        tokenizer=tokenizer,
        max_length=_longest(entry, config, tokenizer, field),
        template_kwargs=template_kwargs,
        trust_remote_code=trust_remote_code,
    )


def weight_bytes(entry: RewardEntry, *, trust_remote_code: bool) -> int:
    """Bytes of a reward model's weights, counted on the meta device. Raises RecipeError where its configuration cannot be read."""
    config = _read_config(entry, "rewards", trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()) * weight_dtype(entry, config).itemsize


def weight_dtype(entry: RewardEntry, config: PreTrainedConfig) -> torch.dtype:
    """The dtype in which a reward model's weights are held."""
    found = config.dtype if entry.dtype == "auto" else getattr(torch, entry.dtype)
    return found if isinstance(found, torch.dtype) else torch.float32


def _read_config(entry: RewardEntry, field: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    options = {"revision": entry.revision or "main", "trust_remote_code": trust_remote_code}
    try:
        written, _ = PreTrainedConfig.get_config_dict(entry.model, revision=entry.revision or "main")
        config = AutoConfig.from_pretrained(entry.model, **options)
        if not {"id2label", "num_labels"} & written.keys():  # transformers would take two
            config.num_labels = 1
    except model_errors() as error:
        raise RecipeError(f"{field}: cannot read the configuration of {entry.model!r}: {reason_of(error)}") from error
    if config.num_labels != 1:
        raise RecipeError(
            f"{field}: {entry.model} has {config.num_labels} labels; a reward model has one (`num_labels: 1`), whose logit is the reward. To "
            "make a reward of a classifier's labels, call it in a reward function."
        )
    return config


def _longest(entry: RewardEntry, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, field: str) -> int | None:
    """Tokens that the model reads at most; None where neither its files nor the recipe say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    known = [n for n in (positions, tokenizer.model_max_length) if isinstance(n, int) and 0 < n < NO_LIMIT]
    built_for = min(known, default=None)
    if entry.max_length is not None and built_for is not None and entry.max_length > built_for:
        raise RecipeError(
            f"{field.rpartition('.')[0]}.max_length: {entry.max_length} is beyond the {built_for} tokens that {entry.model} reads."
        )
    return entry.max_length or built_for


def _load_model(entry: RewardEntry, config: PreTrainedConfig, field: str, *, trust_remote_code: bool) -> PreTrainedModel:
    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            entry.model,
            config=config,
            revision=entry.revision or "main",
            dtype=weight_dtype(entry, config),
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except model_errors() as error:
        raise RecipeError(f"{field}: cannot load {entry.model!r} as a sequence-classification model: {reason_of(error)}") from error
    for name, found, wanted in loading["mismatched_keys"]:
        raise RecipeError(
            f"{field}: {entry.model} has {name} of shape {list(found)}, and a model of one score has {list(wanted)}: a reward model has one label "
            "(`num_labels: 1`), whose logit is the reward. To make a reward of a classifier's labels, call it in a reward function."
        )
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise RecipeError(
            f"{field}: the files of {entry.model!r} lack {len(missing)} of the weights of a sequence-classification model, such as "
            f"{missing[0]}, which would be random numbers: this is no trained reward model."
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _device(entry: RewardEntry) -> torch.device:
    """This process's GPU, which it has chosen by now, or the CPU."""
    is_gpu = entry.device == "auto" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")


def _conversation(prompt: Sequence[Message], completion: Sequence[Message]) -> list[Message]:
    """The prompt's messages and the answer; where the prompt ends with an assistant's message, the answer goes on with it."""
    for message in prompt:
        if not isinstance(message.get("content"), str | None):
            raise ValueError("the prompt has images, or content in parts, which a reward model does not read; use a reward function")
    last = prompt[-1]
    if last["role"] != "assistant":
        return [*prompt, *completion]
    return [*prompt[:-1], {**last, "content": (last.get("content") or "") + completion[0]["content"]}]
