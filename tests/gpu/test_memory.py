import pytest
import torch

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from hpcgen.memory.streams import open_copy_stream

pytestmark = pytest.mark.gpu


@pytest.fixture
def store(cuda):
    store = HostStore(KVLayout(2, 2, 16, 2, 16, torch.bfloat16), 32)
    store.pin()
    yield store
    torch.cuda.cudart().cudaHostUnregister(store.pages.data_ptr())


def test_pages_go_to_the_device_and_back(cuda, store):
    store.pages.copy_(torch.randint(0, 256, store.pages.shape, dtype=torch.uint8))
    before = store.pages.clone()
    device_pages = torch.empty(store.pages.shape, dtype=torch.uint8, device=cuda)
    stream = open_copy_stream(cuda)
    stream.copy([(device_pages[i], store.pages[i]) for i in range(store.count)]).wait()
    device_pages += 1
    stream.copy([(store.pages[i], device_pages[i]) for i in range(store.count)])
    stream.synchronize()
    assert torch.equal(store.pages, before + 1)
    stream.close()


def test_a_copy_comes_after_what_was_computed_before_it(cuda):
    stream = open_copy_stream(cuda)
    matrix = torch.randn(2048, 2048, device=cuda)
    host = torch.empty(2048, 2048, pin_memory=True)
    for _ in range(10):
        matrix = torch.tanh(matrix @ matrix)
    stream.copy([(host, matrix)])
    stream.synchronize()
    assert torch.equal(host, matrix.cpu())
    stream.close()


def test_what_is_computed_after_the_wait_sees_the_copy(cuda):
    stream = open_copy_stream(cuda)
    source = torch.ones(64 << 20, dtype=torch.uint8).pin_memory()
    target = torch.zeros(64 << 20, dtype=torch.uint8, device=cuda)
    event = stream.copy([(target, source)])
    event.wait()
    assert int(target.sum(dtype=torch.int64)) == len(source)
    assert event.done()
    stream.close()
