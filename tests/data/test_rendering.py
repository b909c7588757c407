from __future__ import annotations

import time

import pytest
from tiny import byte_tokenizer

from rloo_cli.data.chat import render_prompt, render_prompts
from rloo_cli.data.rendering import RenderFailure, render_conversations
from rloo_cli.errors import DataError, RecipeError

USER = {"role": "user", "content": "hi"}


def render(template, *conversations, seconds=10.0, **variables):
    return list(render_conversations(conversations or ([USER],), template=template, variables=variables, seconds=seconds))


def test_equals_apply_chat_template():
    tokenizer = byte_tokenizer()
    conversations = [
        [USER],
        [{"role": "system", "content": "é\u2028\n"}, {"role": "user", "content": "x" * 3000}],
        [USER, {"role": "assistant", "content": "The answer is "}],
    ]
    expected = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations[:2]]
    expected.append(tokenizer.apply_chat_template(conversations[2], tokenize=False, continue_final_message=True))
    assert list(render_prompts(conversations, tokenizer=tokenizer, template_kwargs={})) == expected
    assert expected[2].endswith("<|im_start|>assistant\nThe answer is ")


def test_variables_and_special_tokens_reach_the_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ eos_token }}{{ enable_thinking }}{{ messages[0].content }}"
    assert render_prompt([USER], tokenizer=tokenizer, template_kwargs={"enable_thinking": False}) == "<|eos|>Falsehi"


def test_a_string_is_used_as_it_is():
    assert render_prompt("hi", tokenizer=byte_tokenizer(), template_kwargs={}) == "hi"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** (messages|length * 9)) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'x' * 10**11 }}",
    ],
    ids=["nested loops", "a power in C", "doubling text", "huge text"],
)
def test_endless_and_greedy_templates_end(template):
    begin = time.monotonic()
    (failure,) = render(template, seconds=0.5)
    assert isinstance(failure, RenderFailure)
    assert "CPU time" in failure.reason or "MemoryError" in failure.reason
    assert time.monotonic() - begin < 25


def test_the_row_at_which_a_template_loops_is_known():
    template = "{% if messages[0].content == 'bad' %}{{ 9 ** (9 ** (messages|length * 9)) }}{% endif %}ok"
    texts = render(template, [USER], [{"role": "user", "content": "bad"}], [USER], seconds=0.5)
    assert texts[0] == "ok"
    assert texts[1:] == [RenderFailure("it did not end within 0.5 seconds of CPU time; does it loop?", is_fatal=True)]


FAULTS = [
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ raise_exception('roles must\\nalternate') }}", "TemplateError: roles must alternate"),
    ("{{ missing.field }}", "UndefinedError: 'missing' is undefined"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
]


def test_rows_at_which_a_template_fails_give_one_line_each_and_the_others_their_text():
    branches = "".join(f"{{% if messages[0].content == '{i}' %}}{fault}{{% endif %}}" for i, (fault, _) in enumerate(FAULTS))
    contents = [str(i) for i in range(len(FAULTS))] + ["fine"]
    *failures, last = render(branches + "ok", *[[{"role": "user", "content": content}] for content in contents])
    assert last == "ok"
    for failure, (fault, reason) in zip(failures, FAULTS, strict=True):
        assert failure.reason.startswith(reason), fault
        assert "\n" not in failure.reason
        assert not failure.is_fatal


def test_syntax_errors_are_the_recipe_s():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for %}"
    with pytest.raises(RecipeError, match=r"TemplateSyntaxError.*chat_template_path"):
        render_prompt([USER], tokenizer=tokenizer, template_kwargs={})


def test_no_template_names_the_field():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match=r"model.chat_template_path"):
        render_prompt([USER], tokenizer=tokenizer, template_kwargs={})


def test_arguments_of_ours_are_refused():
    with pytest.raises(RecipeError, match="chat_template_kwargs: `add_generation_prompt`"):
        render_prompt([USER], tokenizer=byte_tokenizer(), template_kwargs={"add_generation_prompt": False})


def test_a_failing_template_is_a_data_error():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError, match="the chat template failed: TemplateError: no"):
        render_prompt([USER], tokenizer=tokenizer, template_kwargs={})


def test_a_reader_that_stops_early_leaves_no_process():
    texts = render_conversations(iter([[USER]] * 10_000), template="x", variables={})
    assert next(texts) == "x"
    texts.close()
