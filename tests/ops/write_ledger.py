"""Writes the ledger of records that are not matched, and the numbers for the support table, anew.

Run it after a change to the operators and look at the difference: ``python -m tests.ops.write_ledger``.
"""

from __future__ import annotations

import json
from collections import defaultdict

import torch

from tests.ops.operator_replay import LEDGER, Kind, Replayer, families, is_call, records


def main() -> None:
    """Replay everything."""
    unmatched: dict[Kind, dict[str, list[int]]] = {kind: defaultdict(list) for kind in Kind}
    recorded: dict[str, int] = defaultdict(int)
    for family in families():
        replayer = Replayer()
        with replayer.world, torch.inference_mode():
            for record in records(family):
                if not is_call(record):
                    continue
                recorded[record["op"]] += 1
                kind, _ = replayer.unmatched(record)
                if kind is not None:
                    unmatched[kind][f"{family} {record['op']}"].append(record["n"])
    ledger = {
        "recorded": dict(sorted(recorded.items())),
        "unmatched": {
            kind.value: {name: " ".join(map(str, numbers)) for name, numbers in by_operator.items()}
            for kind, by_operator in unmatched.items()
        },
    }
    LEDGER.write_text(json.dumps(ledger, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
