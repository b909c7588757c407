from __future__ import annotations

import pytest

from rloo_cli.data.content import prompt_content

USER = {"role": "user", "content": "hi"}


def test_strings_stay_strings_without_a_system_prompt():
    assert prompt_content("hi", None) == "hi"


def test_a_system_prompt_makes_messages():
    system = {"role": "system", "content": "be brief"}
    assert prompt_content("hi", "be brief") == [system, USER]
    assert prompt_content([USER], "be brief") == [system, USER]


def test_fields_that_are_none_are_left_out_but_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    tool = {"role": "tool", "content": "4", "tool_calls": None}
    assert prompt_content([USER, call, tool], None) == [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": "4"},
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "is missing or null"),
        ("", "is empty"),
        (3, "expected a string or a list of messages, got 3"),
        (USER, "expected a string or a list of messages, got {'role'"),
        ([], "is an empty list"),
        (["hi"], "message 0: expected an object with role and content, got 'hi'"),
        ([USER, {"content": "x"}], "message 1: expected a role such as user, got None"),
        ([{"role": "user", "content": None}], "message 0: expected a string as content, got None"),
        ([{"role": "user", "content": 7}], "message 0: expected a string as content, got 7"),
        ([{"role": "user", "content": [{"type": "video"}]}], "message 0: expected a part of type text or image"),
        ([{"role": "user", "content": ["hello"]}], "message 0: expected a part of type text or image, got 'hello'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0: expected a part of type text or image"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "an image part with `url`; the images come from the column"),
        ([{"role": "system", "content": "x"}], "ends with a system message"),
    ],
)
def test_what_is_no_prompt(value, message):
    with pytest.raises(ValueError, match=message):
        prompt_content(value, None)


def test_two_system_messages_are_refused():
    with pytest.raises(ValueError, match="remove one of them"):
        prompt_content([{"role": "system", "content": "x"}, USER], "y")
