from hpcgen.checkpoint.restore import RestoreRates, loading_is_cheaper

PAGE_BYTES = 2**20


def test_fast_storage_is_used():
    assert loading_is_cheaper(640, PAGE_BYTES, RestoreRates(1e9, 1000))


def test_slow_storage_is_not():
    assert not loading_is_cheaper(640, PAGE_BYTES, RestoreRates(1e6, 1000))


def test_the_longer_the_sequence_the_more_a_prefill_costs_for_a_token():
    rates = RestoreRates(load_bytes_per_second=9e6, prefill_tokens_per_second=640)
    assert not loading_is_cheaper(512, PAGE_BYTES, rates)
    assert loading_is_cheaper(64 * 512, PAGE_BYTES, rates)
