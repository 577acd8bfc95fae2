import msgspec
import pytest

from hpcgen.batch.messages import AnyMessage


def decode(message):
    return msgspec.json.decode(msgspec.json.encode(message), type=AnyMessage)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_every_role_keeps_its_content(role):
    assert decode({"role": role, "content": "x"}).for_template() == {"role": role, "content": "x"}


def test_a_tool_message_keeps_the_id_of_its_call():
    message = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    assert decode(message).for_template() == message


def test_text_parts_become_lines():
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert decode({"role": "user", "content": content}).for_template()["content"] == "a\nb"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "images"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "file", "file": {}}, "files"),
        ({"type": "video_url", "video_url": {}}, "videos"),
    ],
)
def test_parts_that_are_not_text_are_refused_by_name(part, kind):
    with pytest.raises(msgspec.ValidationError, match=rf"{kind}.*not supported.*content\[1\]|{kind}.*not supported"):
        decode({"role": "user", "content": [{"type": "text", "text": "look"}, part]})


def test_arguments_of_tool_calls_become_objects():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = decode({"role": "assistant", "content": None, "tool_calls": [call]}).for_template()
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_arguments_that_are_no_json_object_are_an_error():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "[1"}}
    with pytest.raises(ValueError, match="'c1'"):
        decode({"role": "assistant", "tool_calls": [call]}).for_template()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "wizard", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "assistant"},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "x", "mood": "good"},
        {"content": "x"},
    ],
)
def test_messages_that_say_too_little_or_too_much_are_refused(message):
    with pytest.raises(msgspec.ValidationError):
        decode(message)
