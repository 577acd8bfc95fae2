from pathlib import Path

import pytest

from hpcgen.server.api_errors import ApiError
from hpcgen.server.errors import ServerError
from hpcgen.server.tokens import NOBODY, Tokens, load_tokens, require_tokens_beyond_loopback
from tests.server.conftest import ANNA, BELA


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    return path


def test_each_token_has_an_owner_of_its_own(token_file: Path) -> None:
    token_file.write_text(f"# comment\n{ANNA}\n\nteam {BELA}\n")
    tokens = load_tokens(token_file, {})
    anna, team = tokens.owner(f"Bearer {ANNA}"), tokens.owner(f"bearer {BELA}")
    assert team == "name:team" and anna.startswith("token:") and ANNA not in anna


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Bearer {ANNA}x", f"Basic {ANNA}", ANNA, f"Bearer {ANNA[:-1]}"]
)
def test_a_wrong_token_is_refused(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        Tokens({ANNA: "anna"}).owner(header)
    assert caught.value.status_code == 401
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}


def test_without_tokens_everybody_is_one(token_file: Path) -> None:
    assert load_tokens(None, {}).owner(None) == NOBODY


def test_tokens_come_from_the_environment_where_there_is_no_file() -> None:
    tokens = load_tokens(None, {"HPCGEN_TOKENS": f"{ANNA}, {BELA}"})
    assert tokens.owner(f"Bearer {ANNA}") != tokens.owner(f"Bearer {BELA}")


def test_a_token_file_that_others_can_read_is_refused(token_file: Path) -> None:
    token_file.write_text(ANNA)
    token_file.chmod(0o640)
    with pytest.raises(ServerError, match="chmod 600"):
        load_tokens(token_file, {})


@pytest.mark.parametrize("text", ["short", f"{ANNA}\n{ANNA}", f"a b {ANNA}"])
def test_a_short_or_repeated_token_is_refused(token_file: Path, text: str) -> None:
    token_file.write_text(text)
    with pytest.raises(ServerError, match="each line is a token"):
        load_tokens(token_file, {})


def test_an_empty_or_missing_file_is_refused(token_file: Path) -> None:
    with pytest.raises(ServerError, match="has no tokens"):
        load_tokens(token_file, {})
    with pytest.raises(ServerError, match="cannot read the token file"):
        load_tokens(token_file.with_name("none"), {})


def test_another_address_than_loopback_needs_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        require_tokens_beyond_loopback(host, Tokens({}))
    for host in ("0.0.0.0", "::", "10.0.0.1", "login1"):
        with pytest.raises(ServerError, match="--token-file"):
            require_tokens_beyond_loopback(host, Tokens({}))
        require_tokens_beyond_loopback(host, Tokens({ANNA: "anna"}))
