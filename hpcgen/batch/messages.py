"""Messages of a chat request as typed data: every role of the OpenAI API, text content only.

What the engine cannot do (images, sound, files) is refused while decoding, so that the error names its place.
"""

from typing import Any, ClassVar

import msgspec


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str


class _UnsupportedPart(msgspec.Struct, tag_field="type"):
    """A content part that is known, so that it gets a clear refusal."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        raise ValueError(f"{self.kind} are not supported: content must be text")


class ImagePart(_UnsupportedPart, tag="image_url"):
    kind: ClassVar[str] = "images"


class VideoPart(_UnsupportedPart, tag="video_url"):
    kind: ClassVar[str] = "videos"


class AudioPart(_UnsupportedPart, tag="input_audio"):
    kind: ClassVar[str] = "audio inputs"


class AudioUrlPart(_UnsupportedPart, tag="audio_url"):
    kind: ClassVar[str] = "audio inputs"


class FilePart(_UnsupportedPart, tag="file"):
    kind: ClassVar[str] = "files"


Part = TextPart | RefusalPart | ImagePart | VideoPart | AudioPart | AudioUrlPart | FilePart
Content = str | list[Part]


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text, as the API has it."""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class Message(msgspec.Struct, tag_field="role", forbid_unknown_fields=True, kw_only=True):
    """One message; the subclasses are the roles."""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content a string, fields that are absent left out.

        Raises:
            ValueError: the arguments of a tool call are not a JSON object.
        """
        message: dict[str, Any] = {"role": self.__struct_config__.tag}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "content":
                message[name] = _text(value)
            elif name == "tool_calls" and value:
                message[name] = [_tool_call_for_template(call) for call in value]
            elif value is not None:
                message[name] = value
        return message


class SystemMessage(Message, tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(Message, tag="developer"):
    content: Content
    name: str | None = None


class UserMessage(Message, tag="user"):
    content: Content
    name: str | None = None


class AssistantMessage(Message, tag="assistant"):
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    """Thoughts of an earlier turn, for templates that take them (an extension that vLLM has too)."""

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("an assistant message needs content, tool_calls or refusal")


class ToolMessage(Message, tag="tool"):
    content: Content
    tool_call_id: str
    name: str | None = None


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def _text(content: Content | None) -> str:
    """Text parts are joined by newlines, as vLLM does for templates that take strings."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)  # type: ignore[union-attr]


def _tool_call_for_template(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict)
    except msgspec.DecodeError as error:
        raise ValueError(f"arguments of tool call {call.id!r} are not a JSON object: {error}") from None
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
