"""HTTPS by the server itself."""

import shutil
import ssl
import subprocess
import threading
import urllib.request
from pathlib import Path

import pytest
import uvicorn

from hpcgen.server.errors import ServerError
from hpcgen.server.front import address, bind
from hpcgen.server.tls import read_tls


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


def test_a_certificate_and_its_key_are_taken_together_or_in_one_file(files, tmp_path):
    certificate, key = files
    assert read_tls(None, None) is None
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    assert read_tls(certificate, key) and read_tls(both, None)


def test_files_that_do_not_serve_are_one_clear_line(files, tmp_path):
    certificate, _ = files
    with pytest.raises(ServerError, match="--tls-certificate"):
        read_tls(None, certificate)
    with pytest.raises(ServerError, match="No such file"):
        read_tls(tmp_path / "none.pem", None)
    with pytest.raises(ServerError, match="cannot use the certificate"):
        read_tls(certificate, None)


def test_clients_that_trust_the_certificate_are_served(files):
    certificate, key = files
    tls = read_tls(certificate, key)
    assert tls is not None

    async def hello(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    listening = bind("127.0.0.1", 0)
    config = uvicorn.Config(hello, ssl_certfile=tls.certificate, ssl_keyfile=tls.key, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(address(listening, tls), context=context, timeout=30) as answer:
            assert answer.read() == b"hello"
    finally:
        server.should_exit = True
        thread.join()
