"""Text to token ids, many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_texts(texts: list[str], *, tokenizer: PreTrainedTokenizerBase, is_templated: bool) -> list[list[int]]:
    """The token ids of each text, never cut.

    A templated text holds its special tokens already and gets no others. A plain string gets what the tokenizer adds in
    front (BOS, for models that have one); an EOS that it would add at the end is left away, for the model is to go on.
    """
    ids = _encode(texts, tokenizer, add_special_tokens=not is_templated)
    if is_templated or not _adds_eos(tokenizer):
        return ids
    return [row[:-1] for row in ids]


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[list[int]]:
    from transformers import PreTrainedTokenizerFast

    if getattr(type(tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus:
        # What that method does, without offsets: five times as fast. A tokenizer.json may come with padding or truncation on.
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, padding=False, truncation=False, verbose=False)
    return list(encoded["input_ids"])


def _adds_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer ends every text with EOS of its own accord (BERT-like post-processors, `add_eos_token: true`)."""
    (bare,), (full,) = (_encode(["a"], tokenizer, add_special_tokens=adds) for adds in (False, True))
    return full[-len(bare) - 1 :] == [*bare, tokenizer.eos_token_id]
