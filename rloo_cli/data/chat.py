"""The tokenizer of a model, and prompts as the model sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.data.adapter_folder import tokenizer_source
from rloo_cli.data.hub import hub_answers, hub_state
from rloo_cli.data.model_folder import CONFIG, check_files, check_numbers, read_object
from rloo_cli.data.problems import show_path
from rloo_cli.data.rendering import RenderFailure, render_conversations
from rloo_cli.data.values import json_value
from rloo_cli.errors import DataError, RecipeError
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.types import Message, PromptContent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEMPLATE_BYTES = 2**20
OWN_ARGUMENTS = frozenset(
    [
        "messages",
        "conversation",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)
"""Arguments of apply_chat_template that this module decides; chat_template_kwargs may not name them."""


def load_tokenizer(model: ModelSection, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or that of an adapter's folder which has one, with the template of `chat_template_path` where one is given.

    Raises:
        RecipeError: no such model, no tokenizer in it, one that cannot be read or that needs the folder's own code, or no such template.
    """
    model = tokenizer_source(model)
    name = model.model_name_or_path
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_files(folder, trust_remote_code=trust_remote_code)
        name = str(folder)
    elif folder.is_file() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise RecipeError(f"model.model_name_or_path: no such folder: {name}")
    else:
        hub_answers()
        _check_hub_config(name, model.model_revision)
    template = None if model.chat_template_path is None else _read_template(Path(model.chat_template_path).expanduser())
    tokenizer = _load_auto(name, model.model_revision, trust_remote_code)
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) <= len(tokenizer.get_added_vocab()):  # transformers makes an empty one where no file holds a vocabulary
        raise RecipeError(f"model.model_name_or_path: {name} has no tokenizer (tokenizer.json or a vocabulary file is missing).")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _check_hub_config(name: str, revision: str | None) -> None:
    """Look at the numbers of a hub model's configuration; where there is none, loading tells why."""
    from transformers.utils import cached_file

    try:
        path = cached_file(name, CONFIG, revision=revision or "main")
    except (OSError, ValueError):
        return
    if path is not None:
        check_numbers(read_object(Path(path)), Path(path))


def _load_auto(name: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "trust_remote_code" in str(error):
            reason = "its tokenizer is code of its own; if you trust it, pass --trust-remote-code"
        elif isinstance(error, OSError) and not Path(name).is_dir():
            reason = f"no such model: no local folder of this name, and {hub_state()}"
        elif "backend tokenizer" in reason:
            reason = "it has no tokenizer (tokenizer.json is missing), or needs sentencepiece or tiktoken to read it"
        raise RecipeError(f"model.model_name_or_path: {name}: {reason}.") from error


def _read_template(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise RecipeError(f"model.chat_template_path: {show_path(path)} is larger than 1 MiB; that is no chat template.")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecipeError(f"model.chat_template_path: no such file: {path}") from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.chat_template_path: {show_path(path)} cannot be read as UTF-8 text: {error}") from error


def render_prompts(
    conversations: Iterable[Sequence[Message]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    are_whole: bool = False,
) -> Iterator[str | RenderFailure]:
    """The text of each conversation by the tokenizer's chat template, the generation prompt added unless they `are_whole` (rendering.py).

    Raises:
        RecipeError: the tokenizer has no chat template, the template is no Jinja, or `template_kwargs` names an argument of ours.
    """
    template = _chat_template(tokenizer, template_kwargs)
    variables = {**{name: str(token) for name, token in tokenizer.special_tokens_map.items()}, **json_value(dict(template_kwargs))}
    for text in render_conversations(conversations, template=template, variables=variables, are_whole=are_whole):
        if isinstance(text, RenderFailure) and text.reason.startswith(("TemplateSyntaxError", "TemplateAssertionError")):
            raise RecipeError(
                f"The chat template of the model cannot be read: {text.reason}. Another can be given as model.chat_template_path."
            )
        yield text


def render_prompt(content: PromptContent, *, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str:
    """The text of one prompt: a string as it is, messages by the chat template.

    Raises:
        RecipeError: as `render_prompts`.
        DataError: the template refuses the messages.
    """
    if isinstance(content, str):
        return content
    (text,) = render_prompts([content], tokenizer=tokenizer, template_kwargs=template_kwargs)
    if isinstance(text, RenderFailure):
        raise DataError(f"the chat template failed: {text.reason}")
    return text


def _chat_template(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str:
    taken = sorted(OWN_ARGUMENTS & template_kwargs.keys())
    if taken:
        raise RecipeError(f"data.chat_template_kwargs: `{taken[0]}` is decided by rloo; remove it.")
    try:
        return str(tokenizer.get_chat_template(tools=template_kwargs.get("tools")))
    except ValueError as error:
        raise RecipeError(
            "data: the prompts are messages, and the model's tokenizer has no chat template to write them. "
            "Give one as model.chat_template_path, or use prompts that are strings."
        ) from error
