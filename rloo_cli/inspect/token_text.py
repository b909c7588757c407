"""Token ids as text with the special tokens in it. The tokenizer's file is read alone: no torch, no transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.errors import RefusedError
from rloo_cli.inspect.stored import run_recipe
from rloo_cli.run.folder import RunFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


class TokenText:
    """Turns ids into text and back."""

    def __init__(self, path: Path) -> None:
        """Raises RefusedError where the file is no tokenizer."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise RefusedError(f"{path}: not a readable tokenizer ({(str(error).splitlines() or [''])[0]}).") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def special_tokens(self) -> tuple[str, ...]:
        """Every special token as `decode` writes it."""
        return tuple(token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a completion's text, no special tokens added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def tokenizer_of_run(folder: RunFolder) -> TokenText:
    """The tokenizer that a run used.

    Raises:
        RefusedError: none is at hand; the message says where it was looked for.
    """
    places = list(_places(folder))
    for place in places:
        if place.is_file():
            return TokenText(place)
    raise RefusedError(
        f"special tokens need the run's tokenizer, and there is no {FILE} in {folder.final}"
        + (f" nor at {places[-1].parent}" if len(places) > 1 else ", nor a model named in its recipe.yaml")
        + ". Without --special the text is shown as reward functions saw it."
    )


def model_tokenizer(model: str, revision: str | None) -> Path | None:
    """Where the tokenizer's file of a local model, or of one in the hub's local cache, lies."""
    local = Path(model) / FILE
    if Path(model).is_dir():
        return local
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached: Any = try_to_load_from_cache(model, FILE, revision=revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _places(folder: RunFolder) -> Iterator[Path]:
    yield folder.final / FILE
    recipe = run_recipe(folder.recipe)
    if recipe is not None:
        path = model_tokenizer(recipe.model.model_name_or_path, recipe.model.model_revision)
        if path is not None:
            yield path
