"""JSON of results: valid, and short enough to read."""

from __future__ import annotations

import json
import math

from routeguard.diagnostics.json_text import json_text


def test_an_array_stands_on_one_line() -> None:
    assert json_text({"a": [1, 2.5, None], "b": {"c": [[1, 2], [3, 4]]}, "d": {}, "e": [], "f": [{"g": "ä\n"}]}) == (
        '{\n  "a": [1,2.5,null],\n  "b": {\n    "c": [\n      [1,2],\n      [3,4]\n    ]\n  },\n'
        '  "d": {},\n  "e": [],\n  "f": [\n    {\n      "g": "\\u00e4\\n"\n    }\n  ]\n}'
    )


def test_it_reads_back_with_null_for_what_is_not_a_number() -> None:
    value = {"a": (math.nan, math.inf, 1.0), "b": [[-math.inf, True]], "c": math.nan, "d": [{}, [], ["x"]], "3": "y"}
    expected = {"a": [None, None, 1.0], "b": [[None, True]], "c": None, "d": [{}, [], ["x"]], "3": "y"}
    assert json.loads(json_text(value)) == expected
