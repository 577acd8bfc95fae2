import io

from hpcgen.report.progress import Counts, Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def counts(done=0, tokens=0, done_tokens=0, phase="decode", failed=0, requests=100):
    return Counts(requests, done, failed, tokens, done_tokens, phase)


def test_without_a_terminal_a_line_is_printed_once_an_interval():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(counts(phase="start"), stream=stream, interval=60, clock=clock)
    for _ in range(180):
        clock.now += 1
        progress.update(counts(done=1, tokens=10, done_tokens=10))
    assert stream.getvalue().count("\n") == 3


def test_a_line_names_requests_phase_rate_and_time_left():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(counts(), stream=stream, interval=10, clock=clock)
    clock.now += 10
    progress.update(counts(done=20, tokens=1000, done_tokens=400, failed=3))
    # 100 requests of 20 tokens each are expected; 1000 of the 2000 tokens took 10 s.
    assert stream.getvalue() == "[0:10] 20/100 requests, decode, 100 tokens/s, 3 failed, 0:10 left\n"


def test_the_time_left_is_unknown_before_the_first_request_is_done():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(counts(), stream=stream, interval=10, clock=clock)
    clock.now += 10
    progress.update(counts(tokens=500))
    assert "time left unknown" in stream.getvalue()


def test_work_of_an_interrupted_job_counts_as_done_but_not_for_the_rate():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(counts(done=50, tokens=5000, done_tokens=5000), stream=stream, interval=10, clock=clock)
    clock.now += 10
    progress.update(counts(done=60, tokens=6000, done_tokens=6000))
    assert stream.getvalue() == "[0:10] 60/100 requests, decode, 100 tokens/s, 0:40 left\n"


def test_the_rate_forgets_what_is_longer_ago_than_its_window():
    clock = Clock()
    progress = Progress(counts(), stream=io.StringIO(), clock=clock)
    tokens = 0
    for rate in (10, 500):
        for _ in range(60):
            clock.now += 1
            tokens += rate
            progress.update(counts(tokens=tokens))
    assert progress.tokens_per_second() == 500


def test_on_a_terminal_a_bar_moves_and_shows_the_last_state_when_closed():
    stream, clock = Terminal(), Clock()
    with Progress(counts(), stream=stream, clock=clock) as progress:
        clock.now += 10
        progress.update(counts(done=40, tokens=100, done_tokens=100, phase="prefill"))
        assert "40/100 requests, prefill, 10 tokens/s" in stream.getvalue()
        progress.update(counts(done=100, tokens=1000, done_tokens=1000, phase="prefill"))
        assert "100/100" not in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert "100/100 requests" in stream.getvalue()


def test_closing_without_a_terminal_prints_the_last_state():
    stream, clock = io.StringIO(), Clock()
    with Progress(counts(), stream=stream, clock=clock) as progress:
        clock.now += 2
        progress.update(counts(done=100, tokens=1000, done_tokens=1000))
    assert stream.getvalue() == "[0:02] 100/100 requests, decode, 500 tokens/s, 0:00 left\n"


def test_an_empty_batch_is_no_division_by_zero():
    with Progress(counts(requests=0), stream=Terminal()) as progress:
        progress.update(counts(requests=0, phase="done"))


def test_durations_read_as_clock_times():
    assert [duration(s) for s in (0, 59.6, 61, 3723, -1)] == ["0:00", "1:00", "1:01", "1:02:03", "0:00"]


def test_requests_that_outgrow_the_mean_still_take_time():
    clock = Clock()
    progress = Progress(counts(), stream=io.StringIO(), clock=clock)
    clock.now += 10
    progress.update(counts(done=90, tokens=5000, done_tokens=900))
    assert progress.seconds_left(clock.now) == 50 * 10 / 5000
