import json

from chat_cases import CASES, cases


def test_the_recorded_renderings_are_what_jinja_makes_of_the_templates():
    assert json.loads(CASES.read_text(encoding="utf-8")) == cases()
