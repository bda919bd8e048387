"""What torch_npu's C++ does with device memory: caching allocator, workspaces, statistics, snapshots. Knows no torch."""
