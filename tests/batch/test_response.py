import json
import math
from array import array
from itertools import pairwise

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.request import RequestError, parse_request
from hpcgen.batch.response import error_line, output_line
from hpcgen.sequence import SamplingParams, Sequence, TokenLogprob


@pytest.fixture(scope="module")
def detokenizer(tokenizer):
    return Detokenizer(tokenizer)


@pytest.fixture
def render(tokenizer, detokenizer):
    """The line for a request whose samples say the given texts; the last token is the end-of-sequence token."""

    def line(request, texts, run_id="run", index=0, cut=None, logprobs=None):
        request = parse_request(index, json.dumps(request).encode())
        samples = []
        for sample, text in enumerate(texts):
            output = array("I", [*tokenizer.encode(text).ids, 1])
            samples.append(
                Sequence(
                    id=sample,
                    request=index,
                    sample=sample,
                    prompt=array("I", [1, 2, 3]),
                    sampling=SamplingParams(max_tokens=9, logprobs=request.body.logprob_count),
                    output=output,
                    finish_reason="stop",
                    text=cut,
                    logprobs=logprobs or [TokenLogprob(t, -0.5, ((t, -0.5), (60, -math.inf))) for t in output],
                )
            )
        return json.loads(output_line(run_id, request, samples, detokenizer, "tiny", created=1_800_000_000))

    return line


def test_a_chat_result_is_a_chat_completion(render, chat):
    line = render(chat("mine", n=2, logprobs=True, top_logprobs=2), ["the fox", "é🙂"])
    assert line["custom_id"] == "mine" and line["error"] is None
    assert line["response"]["status_code"] == 200
    body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
    assert [choice.message.content for choice in body.choices] == ["the fox", "é🙂"]
    assert [choice.index for choice in body.choices] == [0, 1]
    assert {choice.finish_reason for choice in body.choices} == {"stop"}
    assert (body.model, body.created) == ("tiny", 1_800_000_000)


def test_a_completion_result_is_a_text_completion(render, completion):
    line = render(completion(logprobs=2), ["the fox"])
    body = Completion.model_validate(line["response"]["body"], strict=True)
    assert body.choices[0].text == "the fox" and body.object == "text_completion"


def test_the_model_is_the_one_that_the_request_names(render, chat):
    assert render(chat(model="theirs"), ["x"])["response"]["body"]["model"] == "theirs"


def test_usage_counts_the_prompt_once_and_all_samples(render, chat, tokenizer):
    usage = render(chat(n=2), ["fox", "fox"])["response"]["body"]["usage"]
    output = 2 * (len(tokenizer.encode("fox").ids) + 1)
    assert usage == {"prompt_tokens": 3, "completion_tokens": output, "total_tokens": 3 + output}


def test_text_cut_at_a_stop_string_is_kept(render, chat):
    assert render(chat(), ["the fox"], cut="the")["response"]["body"]["choices"][0]["message"]["content"] == "the"
    assert render(chat(), ["the fox"], cut="")["response"]["body"]["choices"][0]["message"]["content"] == ""


def test_without_logprobs_there_are_none(render, chat, completion):
    for request in (chat(), completion()):
        assert render(request, ["x"])["response"]["body"]["choices"][0]["logprobs"] is None


def test_chat_logprobs_give_the_bytes_of_each_token(render, chat):
    body = render(chat(logprobs=True, top_logprobs=2), ["a🙂"])["response"]["body"]
    content = ChatCompletion.model_validate(body).choices[0].logprobs.content
    assert bytes(byte for token in content[:-1] for byte in token.bytes) == "a🙂".encode()
    assert content[-1].token == "<|end|>"
    assert content[0].logprob == -0.5
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -9999.0]


def test_completion_logprobs_have_offsets_into_the_text(render, completion):
    body = render(completion(logprobs=2), ["the fox"])["response"]["body"]
    choice = Completion.model_validate(body).choices[0]
    starts = [*choice.logprobs.text_offset, len(choice.text)]
    pieces = [choice.text[start:stop] for start, stop in pairwise(starts)]
    assert pieces[:-1] == choice.logprobs.tokens[:-1] and pieces[-1] == ""
    assert choice.logprobs.token_logprobs == [-0.5] * len(pieces)


def test_the_chosen_token_is_among_the_alternatives_of_a_completion(render, completion, tokenizer):
    token = tokenizer.encode("fox").ids[0]
    logprobs = [TokenLogprob(token, -3.0, ((60, -0.1),))]
    top = render(completion(logprobs=1), ["fox"], logprobs=logprobs)["response"]["body"]["choices"][0]["logprobs"]
    assert len(top["top_logprobs"][0]) == 2 and top["top_logprobs"][0][top["tokens"][0]] == -3.0


def test_parts_of_characters_stay_different_tokens(render, completion):
    logprobs = render(completion(logprobs=0), ["🙂"])["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["bytes:\\xf0", "bytes:\\x9f"]
    assert logprobs["text_offset"] == [0, 0, 0, 0, 1]


def test_ids_differ_by_request_and_run_and_stay_the_same_when_run_again(render, chat):
    ids = [render(chat(), ["x"], run_id, index)["id"] for run_id in ("r1", "r2") for index in (0, 1)]
    assert len(set(ids)) == 4
    assert render(chat(), ["y"], "r1", 0)["id"] == ids[0]


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (500, "server_error")])
def test_an_error_names_line_code_and_message_in_both_places(status, kind):
    error = RequestError(line=3, code="bad", message="line 3: bad", custom_id="x", param="body.n", status=status)
    line = json.loads(error_line("run", 2, error))
    assert line["custom_id"] == "x"
    assert line["error"] == {"code": "bad", "message": "line 3: bad", "param": "body.n", "line": 3}
    assert line["response"]["status_code"] == status
    assert line["response"]["body"]["error"] == {
        "message": "line 3: bad",
        "type": kind,
        "param": "body.n",
        "code": "bad",
    }


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_prompt_logprobs_stand_at_their_places_in_the_prompt(detokenizer, kind, request):
    body = request.getfixturevalue(kind)(prompt_logprobs=1, prompt_logprobs_start=2)
    sample = Sequence(
        0, 0, 0, array("I", [60, 61, 62]), SamplingParams(max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=2),
        output=array("I", [1]), finish_reason="stop", prompt_logprobs=[TokenLogprob(62, -2.0, ((70, -0.5),))],
    )  # fmt: skip
    parsed = parse_request(0, json.dumps(body).encode())
    line = json.loads(output_line("run", parsed, [sample], detokenizer, "tiny", created=1))
    scores = line["response"]["body"]["choices"][0]["prompt_logprobs"]
    assert scores[:2] == [None, None]
    assert {token: entry["logprob"] for token, entry in scores[2].items()} == {"62": -2.0, "70": -0.5}
    assert scores[2]["62"]["decoded_token"] == detokenizer.token_bytes(62).decode()
