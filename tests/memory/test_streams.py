import torch

from hpcgen.memory.streams import open_copy_stream


def test_copies_keep_their_order_and_an_event_waits_for_those_before_it() -> None:
    stream = open_copy_stream(torch.device("cpu"))
    source, target = torch.arange(1 << 20), torch.zeros(1 << 20, dtype=torch.int64)
    first = stream.copy([(target, source)])
    second = stream.copy([(target, source + 1), (target[:1], source[:1])])
    second.wait()
    assert first.done() and second.done()
    assert target[0] == 0 and target[1] == 2
    stream.close()


def test_buffers_made_in_inference_mode_can_be_written_by_the_copy_thread() -> None:
    stream = open_copy_stream(torch.device("cpu"))
    with torch.inference_mode():
        target = torch.zeros(4)
        stream.copy([(target, torch.ones(4))])
        stream.synchronize()
        assert target.tolist() == [1, 1, 1, 1]
    stream.close()
