"""The certificate of a server that speaks HTTPS itself."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from hpcgen.server.errors import ServerError


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form."""

    certificate: Path
    key: Path


def read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """None where no certificate is given.

    Raises:
        ServerError: the files cannot be read, are no PEM, or do not belong together.
    """
    if certificate is None:
        if key is not None:
            raise ServerError("--tls-key goes with --tls-certificate")
        return None
    key = key or certificate
    try:
        # Without a password: the server must be able to start unattended.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one too
        reason = error.strerror or str(error)
        raise ServerError(f"cannot use the certificate {certificate} with the key {key}: {reason}") from None
    return Tls(certificate.absolute(), key.absolute())
