"""Uploads: multipart/form-data from the network to disk, in pieces, whatever its size."""

import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from anyio import to_thread
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from hpcgen.durable import FILE_MODE, sync_directory
from hpcgen.server.api_errors import ApiError

_BUFFER_BYTES = 2**20
_FIELD_BYTES = 1024
_HEADER_BYTES = 8192
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
PART_PREFIX = ".upload-"


@dataclass
class Upload:
    """What came: the fields, and a file that is whole on disk and has no name in the API yet."""

    path: Path
    filename: str = ""
    bytes: int = 0
    lines: int = 0
    fields: dict[str, str] = field(default_factory=dict)

    def keep(self, path: Path) -> None:
        """Gives the file its place."""
        os.rename(self.path, path)
        sync_directory(path.parent)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


async def receive(content_type: str, stream: AsyncIterator[bytes], directory: Path, most_bytes: int) -> Upload:
    """Reads a form with one part `file` into a file in `directory`.

    Raises:
        ApiError: it is no such form, it is too large, or the disk is full. Nothing is left behind.
    """
    kind, options = parse_options_header(content_type.encode("latin-1"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(400, "send multipart/form-data with a boundary", "invalid_content_type")
    upload = Upload(directory / f"{PART_PREFIX}{secrets.token_hex(8)}")
    fd = os.open(upload.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            await _receive(stream, _Form(boundary, upload, fd, most_bytes))
            await to_thread.run_sync(os.fsync, fd)
        finally:
            os.close(fd)
    except OSError as error:
        upload.discard()
        raise ApiError(507, f"the server cannot store the file: {error.strerror}", "insufficient_storage") from None
    except FormParserError:
        upload.discard()
        raise ApiError(400, "the form is malformed", "invalid_form") from None
    except BaseException:
        upload.discard()
        raise
    return upload


async def _receive(stream: AsyncIterator[bytes], form: "_Form") -> None:
    received = 0
    async for chunk in stream:
        received += len(chunk)
        form.check_size(received - _HEADER_BYTES * 8)
        form.parser.write(chunk)
        if len(form.buffer) >= _BUFFER_BYTES:
            await form.flush()
    form.parser.finalize()
    await form.flush()
    form.check_complete()


class _Form:
    """The parser's callbacks: each part is a known field, held in memory, or the file, collected in a buffer."""

    def __init__(self, boundary: bytes, upload: Upload, fd: int, most_bytes: int) -> None:
        self.upload, self._fd, self._most_bytes = upload, fd, most_bytes
        self.buffer = bytearray()
        self._ended = self._has_file = False
        self._name = self._header = b""
        self._headers: dict[bytes, bytes] = {}
        self._value = bytearray()
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._form_end,
            },
        )

    async def flush(self) -> None:
        data, self.buffer = self.buffer, bytearray()
        if data:
            self.upload.lines += data.count(b"\n")
            await to_thread.run_sync(_write, self._fd, data)

    def check_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise ApiError(
                413, f"the file is larger than the limit of {self._most_bytes} bytes", "file_too_large", "file"
            )

    def check_complete(self) -> None:
        if not self._ended:
            raise ApiError(400, "the form is cut off", "invalid_form")
        if not self._has_file:
            raise ApiError(400, "the form has no file", "missing_required_parameter", "file")

    def _begin(self) -> None:
        self._headers.clear()
        self._header = self._name = b""
        self._value.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._check_header(self._header)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header(self._value)

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = bytes(self._value)
        self._header = b""
        self._value.clear()
        self._check_header(self._headers)

    def _check_header(self, text: bytes | bytearray | dict[bytes, bytes]) -> None:
        if len(text) > (_HEADER_BYTES if not isinstance(text, dict) else 16):
            raise ApiError(400, "the form has headers that are too long", "invalid_form")

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"")
        if self._is_file:
            if self._has_file:
                raise ApiError(400, "the form has more than one file", "invalid_form", "file")
            self._has_file = True
            self.upload.filename = _display_name(options.get(b"filename", b""))
        elif self._name.decode(errors="replace") not in _FIELDS:
            raise ApiError(400, f"unknown field {self._name[:50].decode(errors='replace')!r}", "unknown_parameter")

    @property
    def _is_file(self) -> bool:
        return self._name == b"file"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.upload.bytes += end - start
            self.check_size(self.upload.bytes)
            self.buffer += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _FIELD_BYTES:
            raise ApiError(400, f"the field {self._name.decode()} is too long", "invalid_form")

    def _end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name.decode()] = bytes(self._value).decode(errors="replace")

    def _form_end(self) -> None:
        self._ended = True


def _write(fd: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _display_name(name: bytes) -> str:
    """What the client calls the file: shown, and never used as a path."""
    text = name.decode(errors="replace").replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(character for character in text if character.isprintable())[:255] or "file"
