import pytest

from hpcgen.batch import BatchInput, RequestError
from hpcgen.batch.table import Table, TableError
from hpcgen.batch.template import PromptTemplate, write_requests


def test_columns_are_filled_in_and_doubled_braces_stay():
    template = PromptTemplate("{{Say}} {text}, {n} times: {tags}", ["text", "n", "tags"])
    assert template.fill({"text": "a {b}", "n": 2, "tags": ["x"]}) == '{Say} a {b}, 2 times: ["x"]'


def test_a_column_may_have_any_name():
    assert PromptTemplate.of_column("my {text}", ["my {text}"]).fill({"my {text}": "x"}) == "x"


@pytest.mark.parametrize("template", ["{texd}", "{text", "{text.x}", "{text!r}", "{text:>5}", "{}", "{0}"])
def test_a_template_that_does_not_fit_the_columns_is_refused_at_once(template):
    with pytest.raises(TableError, match="template"):
        PromptTemplate(template, ["text"])


def test_an_unknown_column_is_refused_with_those_that_there_are():
    with pytest.raises(TableError, match="no column 'texd'; there are: id, text"):
        PromptTemplate.of_column("texd", ["id", "text"])


@pytest.mark.parametrize("chat", [True, False])
def test_each_row_is_the_request_at_its_place_and_bad_rows_are_bad_requests(tmp_path, chat):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{broken\n{"other": 1}\n{"text": "d"}\n')
    table = Table(tmp_path / "t.jsonl")
    template = PromptTemplate("Say {text}", table.columns())
    assert write_requests(table, template, tmp_path / "requests.jsonl", {"max_tokens": 5}, chat) == 4
    batch = BatchInput(tmp_path / "requests.jsonl")
    items = [batch.read(i) for i in range(4)]
    assert [isinstance(item, RequestError) for item in items] == [False, True, True, False]
    assert items[1].code == "invalid_json" and "got `null`" in items[2].message
    assert items[3].custom_id == "row-3" and items[3].body.max_tokens == 5
    assert (items[3].body.messages[0].content if chat else items[3].body.prompt) == "Say d"
