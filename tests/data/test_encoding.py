from __future__ import annotations

import pytest
from tiny import byte_tokenizer
from tokenizers import processors

from rloo_cli.data.encoding import encode_texts


def adding(template):
    """A tokenizer whose post-processor puts special tokens around a text."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<|im_start|>", 258), ("<|eos|>", 257)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("template", "front"),
    [("<|im_start|> $A <|eos|>", [258]), ("<|im_start|> $A", [258]), ("$A <|eos|>", []), ("<|eos|> $A", [257]), ("$A", [])],
)
def test_plain_text_gets_bos_but_no_eos_and_templated_text_neither(template, front):
    tokenizer = adding(template)
    plain = encode_texts(["ab", "a<|eos|>", ""], tokenizer=tokenizer, is_templated=False)
    assert plain == [[*front, 97, 98], [*front, 97, 257], front]
    assert encode_texts(["ab", "<|im_start|>a"], tokenizer=tokenizer, is_templated=True) == [[97, 98], [258, 97]]


def test_the_fast_way_gives_what_a_call_of_the_tokenizer_gives():
    tokenizer = byte_tokenizer()
    texts = ["", "a", "é 漢字 🙂", "<|im_start|>user\n x<|im_end|>", "x" * 5000]
    assert encode_texts(texts, tokenizer=tokenizer, is_templated=True) == tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_other_tokenizers_are_called():
    class Own(type(byte_tokenizer())):
        def _encode_plus(self, *arguments, **keywords):
            return super()._encode_plus(*arguments, **keywords)

    tokenizer = Own(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|eos|>")
    assert encode_texts(["ab", "c"], tokenizer=tokenizer, is_templated=False) == [[97, 98], [99]]


def test_truncation_and_padding_that_a_tokenizer_file_brings_are_off():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=4)
    assert encode_texts(["abc", "d"], tokenizer=tokenizer, is_templated=True) == [[97, 98, 99], [100]]
