"""What torch_npu's C++ does with device memory: caching, workspaces, statistics, snapshots. Knows no torch."""
