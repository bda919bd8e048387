"""Trace files: what is read of each format, and the text of every refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from xlite_runner.bench.traces import READERS, SampleRequest, TimedTraceLabels, read_timed_trace
from xlite_runner.errors import WorkloadError

TRACES = Path(__file__).parents[1] / "data" / "serving" / "traces"


def figures(samples: list[SampleRequest]) -> list[tuple[float | None, int, int]]:
    return [(sample.timestamp, sample.prompt_len, sample.expected_output_len) for sample in samples]


def read(name: str, kind: str | None = None) -> list[SampleRequest]:
    return list(READERS[kind or name.partition(".")[0]](TRACES / name))


def test_sharegpt_takes_the_first_two_turns_of_pairs_of_usual_length():
    # 62 and 87 characters; 17 bytes of 14 characters, and 37. Four bytes are a token.
    assert figures(read("sharegpt.json")) == [(None, 16, 22), (None, 5, 10)]


def test_custom_prompts_that_are_equal_share_their_tokens():
    first, second, third = read("custom.jsonl")
    assert figures([first, second, third]) == [(None, 8, 20), (None, 5, 21), (None, 8, 5)]
    assert first.prompt == third.prompt != second.prompt


def test_azure_starts_at_the_first_request():
    assert figures(read("azure.csv")) == [(0.0, 374, 44), (0.251234, 396, 109), (1.5, 879, 55)]
    assert figures(read("azure_utc.csv", "azure")) == [(0.0, 374, 44), (1.0, 396, 109)]


def test_burstgpt_takes_answered_requests_to_gpt4():
    assert figures(read("burstgpt.csv")) == [(0.0, 1087, 230), (75.5, 1360, 276)]


def test_mooncake_chunks_are_shared_unless_the_last_one_is_cut_differently():
    first, second, third = read("mooncake.jsonl")
    assert figures([first, second, third]) == [(0.0, 1100, 40), (3.0, 1536, 12), (3.0, 1100, 3)]
    assert first.prompt[:2] == second.prompt[:2]
    assert first.prompt[2] not in second.prompt
    assert first.prompt == third.prompt
    assert [segment.num_tokens for segment in first.prompt] == [512, 512, 76]


def test_timed_trace_has_names_of_ones_own_choice():
    labels = TimedTraceLabels(
        timestamp="at", input_length="in", output_length="out", hash_ids="ids", chunk_hash_size=16, sec_multiplier=2.0
    )
    first, second = read_timed_trace(TRACES / "timed.jsonl", labels)
    assert figures([first, second]) == [(1.0, 40, 3), (0.5, 20, 4)]
    assert [segment.num_tokens for segment in first.prompt] == [16, 16, 8]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("sharegpt", "{", "trace:1: not JSON: Expecting property name"),
        ("sharegpt", "{}", "expected a list of conversations, found dict"),
        ("sharegpt", '[{"turns": []}]', 'entry 0 has no list "conversations"'),
        ("sharegpt", '[{"conversations": [{}, {}]}]', 'entry 0: every turn needs a text "value"'),
        ("custom", '{"prompt": "x"}', 'trace:1: missing "output_tokens"; found prompt'),
        ("custom", '{"prompt": 5, "output_tokens": 5}', "trace:1: prompt = 5: allowed is a text"),
        ("custom", "[]", "trace:1: expected a JSON object, found \\[\\]"),
        ("custom", "\nno", "trace:2: not JSON: Expecting value"),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1",
            "trace:2: TIMESTAMP = 'noon': allowed is a time like",
        ),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2026-02-30 00:00:00,1,1",
            "trace:2: TIMESTAMP = '2026-02-30 00:00:00': allowed is a time like",
        ),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2026-02-03 00:00:01,1,1\n2026-02-03 00:00:00,1,1",
            "trace:3: TIMESTAMP is before that of the first row",
        ),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2026-02-03 00:00:00,0,1",
            "ContextTokens = '0': allowed is a whole number of tokens from 1",
        ),
        ("azure", "TIMESTAMP,GeneratedTokens\n2026-02-03 00:00:00,1", 'missing "ContextTokens"; found TIMESTAMP, Gen'),
        ("mooncake", '{"timestamp": -1, "input_length": 1, "output_length": 1}', "timestamp = -1: allowed is a number"),
        ("mooncake", '{"timestamp": 0, "input_length": 1.5, "output_length": 1}', "input_length = 1.5: allowed"),
        ("mooncake", "1" * 5000, "trace:1: not JSON that can be read: Exceeds the limit"),
        ("mooncake", "[" * 100_000, "trace:1: not JSON that can be read: maximum recursion depth"),
        (
            "mooncake",
            '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
            "timestamp = nan: allowed is a number",
        ),
        (
            "mooncake",
            '{"timestamp": true, "input_length": 1, "output_length": 1}',
            "timestamp = True: allowed is a num",
        ),
        (
            "mooncake",
            '{"timestamp": 1e18, "input_length": 1, "output_length": 1}',
            "allowed is a number from 0 to 1e.12",
        ),
        ("mooncake", '{"timestamp": 0, "input_length": 3000000000, "output_length": 1}', "from 1 to 2147483647"),
        ("mooncake", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 0}', "hash_ids = 0: allowed"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [true]}',
            "hash_ids = .True.",
        ),
        ("sharegpt", "[" * 100_000, "trace:1: not JSON that can be read: maximum recursion depth"),
        ("sharegpt", "", "trace:1: not JSON: Expecting value"),
        ("custom", '{"prompt": "", "output_tokens": 5}', "trace:1: prompt = '': allowed is a text that is not empty"),
        (
            "burstgpt",
            "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,1,1\n4,GPT-4,1,1",
            "trace:3: Timestamp is before that of the first row",
        ),
        ("burstgpt", "Timestamp,Model,Request tokens,Response tokens\nnan,GPT-4,1,1", "Timestamp = 'nan': allowed"),
        ("burstgpt", "Timestamp,Model\n1,GPT-4", 'trace:2: missing "Response tokens"; found Timestamp, Model'),
        ("burstgpt", "Timestamp,Model\n1," + "x" * 200_000, "trace:2: not CSV: field larger than field limit"),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1950-02-03 00:00:01,1,1\n2026-02-03 00:00:00,1,1",
            "trace:3: TIMESTAMP is more than 1e.09 s after that of the first row",
        ),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids = \\['a'\\]: allowed is a list of whole numbers from 0",
        ),
    ],
)
def test_refusals_name_place_value_and_what_is_allowed(tmp_path, kind, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        list(READERS[kind](path))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(WorkloadError, match="cannot read the trace: No such file or directory"):
        list(READERS["custom"](tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"\n\xff")
    for read in READERS.values():
        with pytest.raises(WorkloadError, match="bytes:2: not UTF-8 text: invalid start byte at byte 1"):
            list(read(tmp_path / "bytes"))
        with pytest.raises(WorkloadError, match="cannot read the trace: Is a directory"):
            list(read(tmp_path))


def test_texts_with_odd_characters(tmp_path):
    path = tmp_path / "trace"
    path.write_text('\ufeff{"prompt": "a\u2028b", "output_tokens": 2}\n{"prompt": "\\ud800", "output_tokens": 1}\n')
    assert figures(READERS["custom"](path)) == [(None, 2, 2), (None, 1, 1)]
    path.write_text('TIMESTAMP,ContextTokens,GeneratedTokens,Note\n2026-02-03 00:00:00,1,1,"two\nlines"\nnoon,1,1,')
    with pytest.raises(WorkloadError, match="trace:4: TIMESTAMP = 'noon'"):
        list(READERS["azure"](path))
