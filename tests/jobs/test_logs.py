import io

import pytest

from hpcgen.jobs.logs import NoLogs, follow, log_files, show


def write(run, name, text):
    (run / "jobs").mkdir(parents=True, exist_ok=True)
    with open(run / "jobs" / name, "a") as file:
        file.write(text)


def test_logs_of_a_rank_come_in_the_order_of_their_jobs(tmp_path):
    for name in ("10_0_log.out", "9_0_log.out", "9_1_log.out", "9_submission.sh"):
        write(tmp_path, name, "")
    assert [path.name for path in log_files(tmp_path)] == ["9_0_log.out", "10_0_log.out"]
    assert [path.name for path in log_files(tmp_path, rank=1)] == ["9_1_log.out"]


def test_logs_of_an_array_are_those_of_all_its_tasks(tmp_path):
    for task in (0, 2, 10):
        write(tmp_path, f"7_{task}_0_log.out", "")
    assert [path.name for path in log_files(tmp_path)] == ["7_0_0_log.out", "7_2_0_log.out", "7_10_0_log.out"]


def test_a_log_is_shown_whole_or_its_end(tmp_path):
    write(tmp_path, "1_0_log.out", "a\nb\nc\n")
    out = io.StringIO()
    show(tmp_path, out)
    assert out.getvalue() == "a\nb\nc\n"
    out = io.StringIO()
    show(tmp_path, out, tail=1)
    assert out.getvalue() == "c\n"


def test_several_logs_are_told_apart(tmp_path):
    write(tmp_path, "1_0_log.out", "a\n")
    write(tmp_path, "2_0_log.out", "b\n")
    out = io.StringIO()
    show(tmp_path, out)
    assert out.getvalue() == "==> 1_0_log.out <==\na\n==> 2_0_log.out <==\nb\n"


def test_no_log_is_one_clear_message(tmp_path):
    with pytest.raises(NoLogs, match="no job of it has started"):
        show(tmp_path, io.StringIO())


def test_following_shows_what_is_added_also_in_new_logs_and_ends_with_the_jobs(tmp_path):
    write(tmp_path, "1_0_log.out", "a\n")
    out = io.StringIO()
    shown = show(tmp_path, out)
    steps = iter([
        lambda: write(tmp_path, "1_0_log.out", "b\n"),
        lambda: write(tmp_path, "2_0_log.out", "c\n"),
        lambda: write(tmp_path, "2_0_log.out", "d\n"),
    ])  # fmt: skip
    over = [False]

    def step(seconds):
        action = next(steps, None)
        if action is not None:
            action()
        over[0] = action is None

    follow(tmp_path, out, shown, lambda: over[0], sleep=step)
    assert out.getvalue() == "a\nb\n==> 2_0_log.out <==\nc\nd\n"
