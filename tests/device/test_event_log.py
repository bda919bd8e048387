"""The event log and its hash."""

from __future__ import annotations

import hashlib

from npusim.device.event_log import EventLog


def test_the_digest_is_that_of_the_events_as_text():
    log = EventLog()
    log.record("hbm.malloc", 0, 4096)
    log.record("charge", 1)
    assert log.digest == hashlib.sha256(b"hbm.malloc\x1f0\x1f4096\ncharge\x1f1\n").hexdigest()
    assert log.num_events == 2


def test_events_are_kept_only_if_asked_for():
    log, keeping = EventLog(), EventLog(keep=True)
    for each in (log, keeping):
        each.record("a", 1)
    assert log.events is None
    assert keeping.events == [("a", 1)]
    assert log.digest == keeping.digest


def test_fields_and_events_do_not_run_into_each_other():
    digests = set()
    for events in ([("a", "b")], [("ab",)], [("a",), ("b",)], [("a", ""), ("b",)], []):
        log = EventLog()
        for fields in events:
            log.record(*fields)
        digests.add(log.digest)
    assert len(digests) == 5
