"""The card and its driver: HBM, ledger of bytes, event log, streams, faults. Knows neither torch nor torch_npu."""
