from hpcgen.checkpoint.order import recompute_cost, save_order


def test_the_sequence_that_costs_most_for_a_page_comes_first():
    order = save_order([64, 640, 128], [[1], list(range(10, 20)), [2, 3]])
    assert [row.sequence for row in order] == [1] * 10 + [2] * 2 + [0]


def test_a_page_follows_those_before_it():
    order = save_order([200], [[9, 3, 7, 5]])
    assert [(row.number, row.page) for row in order] == [(0, 9), (1, 3), (2, 7), (3, 5)]


def test_a_page_that_is_nearly_empty_counts_as_a_whole_one():
    # 65 tokens take two pages, so that they save less for a byte than 64 do.
    assert [row.sequence for row in save_order([65, 64], [[1, 2], [3]], cost=float)] == [1, 0, 0]


def test_pages_without_kv_and_kv_without_pages_are_left_out():
    assert save_order([0, 100, 64], [[1, 2], [], [3, 4]]) == [(2, 0, 3)]


def test_attention_makes_long_prompts_cost_more_for_a_token():
    assert recompute_cost(8192) / 8192 > 1.9 * recompute_cost(1)
