import argparse

import pytest

from hpcgen.cli import build_parser, main, positive, size


@pytest.mark.parametrize(
    ("text", "number"),
    [("24GiB", 24 * 2**30), ("500MB", 500 * 10**6), ("1.5g", 1_500_000_000), ("4096", 4096), ("2 kib", 2048)],
)
def test_sizes_are_read_as_people_write_them(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1", "12 parsecs", "1e9"])
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="24GiB"):
        size(text)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many"])
def test_counts_are_whole_and_above_zero(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        positive(text)


def test_every_command_has_a_help_that_says_what_it_does() -> None:
    parser = build_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert {"run", "convert", "verify"} <= set(commands)
    for name, command in commands.items():
        assert command.description, name
        assert all(action.help for action in command._actions if action.option_strings), name


def test_no_command_is_an_error_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 2 and "usage: hpcgen" in capsys.readouterr().err
