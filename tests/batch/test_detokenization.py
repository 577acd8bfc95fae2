import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from hpcgen.batch.detokenization import Detokenizer, text_offsets

TEXT = st.text(alphabet="theabc é日🙂\n", max_size=40)


@pytest.fixture(scope="session")
def detokenizer(tokenizer):
    return Detokenizer(tokenizer)


@pytest.fixture(scope="session")
def byte_fallback():
    """A tokenizer as Llama 2's and Mistral's: pieces with a mark for spaces, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "a", "b"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Detokenizer(tokenizer), vocabulary


def naive_stop(tokenizer, tokens, stop, min_tokens):
    """Decodes all from the start at every token: (tokens until the stop, text before it), or None."""
    before = ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True).rstrip("\ufffd")
        starts = [
            start
            for s in stop
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > len(before)
        ]
        if starts and count >= min_tokens:
            return count, text[: min(starts)]
        before = text
    return None


def run(matcher, tokens):
    for count, token in enumerate(tokens, 1):
        if matcher.push(token):
            return count, matcher.text
    assert matcher.text is None
    return None


@settings(max_examples=300, deadline=None)
@given(
    text=TEXT,
    stop=st.lists(st.text(alphabet="theabc é日🙂", min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 5),
)
def test_the_matcher_stops_where_decoding_everything_again_would(tokenizer, detokenizer, text, stop, least):
    tokens = tokenizer.encode(text).ids
    assert run(detokenizer.stop_matcher(stop, least), tokens) == naive_stop(tokenizer, tokens, stop, least)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 279), max_size=30), stop=st.sampled_from(["e", "日", "th", " the"]))
def test_the_matcher_agrees_on_any_tokens_of_a_byte_level_tokenizer(tokenizer, detokenizer, tokens, stop):
    assert run(detokenizer.stop_matcher([stop]), tokens) == naive_stop(tokenizer, tokens, [stop], 0)


def test_a_stop_string_may_span_tokens_and_lie_inside_one(tokenizer, detokenizer):
    tokens = tokenizer.encode("the quick brown fox").ids
    assert run(detokenizer.stop_matcher(["k bro"]), tokens)[1] == "the quic"
    assert run(detokenizer.stop_matcher(["uic"]), tokens)[1] == "the q"


def test_a_character_of_several_tokens_is_matched_when_it_is_whole(tokenizer, detokenizer):
    tokens = tokenizer.encode("a🙂b").ids
    assert len(tokens) == 6
    assert run(detokenizer.stop_matcher(["🙂"]), tokens) == (5, "a")


def test_after_a_resume_the_matcher_goes_on_in_the_middle_of_a_stop_string(tokenizer, detokenizer):
    tokens = tokenizer.encode("the fox abcabd").ids
    for cut in range(len(tokens)):
        matcher = detokenizer.stop_matcher(["abd"], output=tokens[:cut])
        assert run(matcher, tokens[cut:])[1] == "the fox abc"


def test_special_tokens_are_no_text(tokenizer, detokenizer):
    assert detokenizer.text([*tokenizer.encode("fox").ids, 1]) == "fox"
    assert detokenizer.is_special(1) and not detokenizer.is_special(50)


def test_stray_bytes_do_not_end_the_search(byte_fallback):
    detokenizer, ids = byte_fallback
    tokens = [ids["<0x41>"], ids["<0xFF>"], ids["▁the"]]
    assert run(detokenizer.stop_matcher([" the"]), tokens)[0] == 3


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 262), max_size=30))
def test_no_tokens_of_a_byte_fallback_tokenizer_make_the_matcher_fail(byte_fallback, tokens):
    assert run(byte_fallback[0].stop_matcher(["never in there"]), tokens) is None


@given(text=TEXT)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer, detokenizer, text):
    assert b"".join(map(detokenizer.token_bytes, tokenizer.encode(text).ids)) == text.encode()


def test_bytes_of_pieces_with_marks_for_spaces_and_of_bytes(byte_fallback):
    detokenizer, ids = byte_fallback
    assert detokenizer.token_bytes(ids["▁the"]) == b" the"
    assert detokenizer.token_bytes(ids["<0xE6>"]) == b"\xe6"
    assert detokenizer.token_bytes(ids["</s>"]) == b"</s>"
    assert detokenizer.token_bytes(10_000) == b""


def test_offsets_count_characters_and_a_character_starts_where_its_first_byte_does():
    assert text_offsets([b"ab", b"\xe6\x97", b"\xa5", b"", b"c"]) == [0, 2, 2, 3, 3]


def test_it_loads_from_a_model_directory(model_directory, tokenizer):
    assert Detokenizer.load(model_directory).text(tokenizer.encode("the dog").ids) == "the dog"
