"""Recorded workloads: files that say when requests came, how long their prompts were, and how much was generated.

Formats are those that ``vllm bench serve`` reads, and two public ones it does not. Prompts in words are counted as
:data:`BYTES_PER_TOKEN` bytes of UTF-8 per token, since no tokenizer is at hand (grade: assumed).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xlite_runner.errors import WorkloadError

BYTES_PER_TOKEN = 4
"""English text of byte-pair tokenizers has about four bytes per token."""

MOONCAKE_CHUNK_TOKENS = 512
"""Tokens that one id in ``hash_ids`` of a Mooncake trace stands for."""

MAX_TOKENS = 2**31 - 1
"""What fits into the lengths of a batch, int32."""

MAX_SECONDS = 1e9
"""Thirty years; nanoseconds stay exact enough to be told apart."""

_SHAREGPT_MIN_TOKENS, _SHAREGPT_MAX_PROMPT, _SHAREGPT_MAX_TOTAL = 4, 1024, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a prompt; segments with equal keys have equal tokens.

    Attributes:
        key: Which tokens.
        num_tokens: How many.
    """

    key: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One request of a workload.

    Attributes:
        prompt: Its stretches, first to last.
        expected_output_len: Tokens to generate.
        timestamp: When it comes, in seconds after the start; None where the workload has no times of its own.
    """

    prompt: tuple[Segment, ...]
    expected_output_len: int
    timestamp: float | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return sum(segment.num_tokens for segment in self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTraceLabels:
    """How a timed trace names its columns; names and defaults are those of vLLM's flags ``--timed-trace-...``.

    Attributes:
        chunk_hash_size: Tokens that one hash id stands for.
        sec_multiplier: What turns a timestamp into seconds.
    """

    timestamp: str = "timestamp"
    input_length: str = "input_length"
    output_length: str = "output_length"
    hash_ids: str = "hash_ids"
    chunk_hash_size: int = 16
    sec_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class _Row:
    """One record of a file, and where it stands for error texts."""

    path: Path
    line: int
    values: Mapping[str, Any] = field(repr=False)

    def error(self, text: str) -> WorkloadError:
        return WorkloadError(f"{self.path}:{self.line}: {text}")

    def value(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise self.error(f'missing "{key}"; found {", ".join(map(str, self.values))}')
        return value

    def tokens(self, key: str, *, least: int = 1) -> int:
        value = self.value(key)
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = least - 1
        if not least <= number <= MAX_TOKENS or isinstance(value, (bool, float)):
            raise self.error(
                f"{key} = {_shown(value)}: allowed is a whole number of tokens from {least} to {MAX_TOKENS}"
            )
        return number

    def seconds(self, key: str, multiplier: float = 1.0) -> float:
        """A time; ``multiplier`` turns the file's unit into seconds."""
        value = self.value(key)
        try:
            number = float(value) * multiplier
        except (TypeError, ValueError, OverflowError):
            number = -1.0
        if not 0 <= number <= MAX_SECONDS or isinstance(value, bool):
            raise self.error(f"{key} = {_shown(value)}: allowed is a number from 0 to {MAX_SECONDS / multiplier:g}")
        return number

    def after(self, key: str, moment: float, start: float) -> float:
        """Seconds from ``start``, the first row's ``key``, to ``moment``, this row's."""
        if moment < start:
            raise self.error(f"{key} is before that of the first row")
        if moment - start > MAX_SECONDS:
            raise self.error(f"{key} is more than {MAX_SECONDS:g} s after that of the first row")
        return moment - start

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str) or not value:
            raise self.error(f"{key} = {_shown(value)}: allowed is a text that is not empty")
        return value


def read_sharegpt(path: Path) -> Iterator[SampleRequest]:
    """A JSON list of conversations: the first turn is the prompt, the second as long as what is generated.

    Conversations of fewer than two turns are left out, and so are, as in vLLM, prompts and answers under 4 tokens,
    prompts over 1024, and pairs over 2048.
    """
    conversations = _json(_text(path), path, 1)
    if not isinstance(conversations, list):
        raise WorkloadError(f"{path}: expected a list of conversations, found {type(conversations).__name__}")
    for index, entry in enumerate(conversations):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise WorkloadError(f'{path}: entry {index} has no list "conversations"')
        if len(turns) < 2:
            continue
        try:
            prompt_len, output_len = (_num_tokens(turn["value"]) for turn in turns[:2])
        except (KeyError, TypeError, AttributeError):
            raise WorkloadError(f'{path}: entry {index}: every turn needs a text "value"') from None
        too_short = min(prompt_len, output_len) < _SHAREGPT_MIN_TOKENS
        if too_short or prompt_len > _SHAREGPT_MAX_PROMPT or prompt_len + output_len > _SHAREGPT_MAX_TOTAL:
            continue
        yield _unshared(index, prompt_len, output_len)


def read_custom(path: Path) -> Iterator[SampleRequest]:
    """JSON lines with ``prompt`` and ``output_tokens``; equal prompts have equal tokens."""
    keys: dict[str, int] = {}
    for row in _json_lines(path):
        prompt = row.text("prompt")
        key = keys.setdefault(prompt, len(keys))
        yield _unshared(key, _num_tokens(prompt), row.tokens("output_tokens"))


def read_azure(path: Path) -> Iterator[SampleRequest]:
    """The Azure inference traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens; the first request is at 0."""
    start: int | None = None
    for index, row in enumerate(_csv_rows(path)):
        moment = _nanoseconds(row, "TIMESTAMP")
        start = moment if start is None else start
        timestamp = row.after("TIMESTAMP", (moment - start) / 1e9, 0)
        yield _unshared(index, row.tokens("ContextTokens"), row.tokens("GeneratedTokens"), timestamp)


def read_burstgpt(path: Path) -> Iterator[SampleRequest]:
    """BurstGPT: CSV; of the rows with model GPT-4 that got an answer, as in vLLM. The first of them comes at 0."""
    start: float | None = None
    for index, row in enumerate(_csv_rows(path)):
        if row.text("Model") != "GPT-4" or row.tokens("Response tokens", least=0) == 0:
            continue
        moment = row.seconds("Timestamp")
        start = moment if start is None else start
        timestamp = row.after("Timestamp", moment, start)
        yield _unshared(index, row.tokens("Request tokens"), row.tokens("Response tokens"), timestamp)


def read_mooncake(path: Path) -> Iterator[SampleRequest]:
    """Mooncake: JSON lines; times in ms, prompts as ids of chunks of 512 tokens. Equal ids are equal tokens."""
    return read_timed_trace(path, TimedTraceLabels(chunk_hash_size=MOONCAKE_CHUNK_TOKENS, sec_multiplier=0.001))


def read_timed_trace(path: Path, labels: TimedTraceLabels = TimedTraceLabels()) -> Iterator[SampleRequest]:
    """JSON lines with times, lengths and hash ids of chunks, which say what prompts share.

    As in vLLM, a last chunk that is not full is shared only with one of the same length, and a prompt is at most as
    long as its chunks. A request without hash ids shares nothing.
    """
    for index, row in enumerate(_json_lines(path)):
        prompt_len = row.tokens(labels.input_length)
        output_len = row.tokens(labels.output_length)
        timestamp = row.seconds(labels.timestamp, labels.sec_multiplier)
        hash_ids = row.values.get(labels.hash_ids)
        hash_ids = [] if hash_ids is None else hash_ids
        if not isinstance(hash_ids, list) or not all(type(key) is int and key >= 0 for key in hash_ids):
            raise row.error(f"{labels.hash_ids} = {_shown(hash_ids)}: allowed is a list of whole numbers from 0")
        if not hash_ids:
            yield _unshared(index, prompt_len, output_len, timestamp)
            continue
        segments = []
        for key in hash_ids:
            size = min(labels.chunk_hash_size, prompt_len)
            if size > 0:
                segments.append(Segment(key=(_SHARED, key, size), num_tokens=size))
            prompt_len -= size
        yield SampleRequest(prompt=tuple(segments), expected_output_len=output_len, timestamp=timestamp)


READERS: Mapping[str, Callable[[Path], Iterator[SampleRequest]]] = {
    "sharegpt": read_sharegpt,
    "custom": read_custom,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
}
"""Readers by the workload's ``dataset_name``, but the timed trace's, which has settings of its own."""

_UNSHARED, _SHARED = 0, 1
_MAX_SHOWN = 80


def _unshared(key: int, prompt_len: int, output_len: int, timestamp: float | None = None) -> SampleRequest:
    prompt = (Segment(key=(_UNSHARED, key), num_tokens=prompt_len),)
    return SampleRequest(prompt=prompt, expected_output_len=output_len, timestamp=timestamp)


def _num_tokens(text: str) -> int:
    return -(-len(text.encode(errors="surrogatepass")) // BYTES_PER_TOKEN)


def _shown(value: object) -> str:
    """A value for an error text, which a whole book would make unreadable."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _nanoseconds(row: _Row, key: str) -> int:
    """A date and time of day as nanoseconds since some moment; times with an offset are taken to UTC."""
    text = row.text(key)
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d{1,9})?)\d*(Z|[+-]\d\d:\d\d)?", text)
    try:
        if match is None:
            raise ValueError
        date, time, offset = match.groups(default="Z")
        nanoseconds = int(np.datetime64(f"{date}T{time}", "ns").astype(np.int64))
    except ValueError:
        raise row.error(f"{key} = {text!r}: allowed is a time like 2023-11-16 18:15:46.6805900") from None
    if offset == "Z":
        return nanoseconds
    hours, minutes = int(offset[1:3]), int(offset[4:6])
    return nanoseconds - int(f"{offset[0]}1") * (hours * 60 + minutes) * 60 * 10**9


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise WorkloadError(f"{path}: cannot read the trace: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise WorkloadError(f"{path}:{line}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _json(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}:{first_line + error.lineno - 1}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; lists in lists in lists
        raise WorkloadError(f"{path}:{first_line}: not JSON that can be read: {error}") from None


def _json_lines(path: Path) -> Iterator[_Row]:
    # JSON's texts may contain what str.splitlines() takes for the end of a line, such as U+2028.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        values = _json(line, path, number)
        if not isinstance(values, dict):
            raise WorkloadError(f"{path}:{number}: expected a JSON object, found {line.strip()[:40]}")
        yield _Row(path, number, values)


def _csv_rows(path: Path) -> Iterator[_Row]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""))
    try:
        for values in reader:
            yield _Row(path, reader.line_num, values)
    except csv.Error as error:
        raise WorkloadError(f"{path}:{reader.line_num + 1}: not CSV: {error}") from None
