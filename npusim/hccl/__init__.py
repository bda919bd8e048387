"""HCCL without torch: communicators and the memory they take, and how the ranks of one process meet in collectives."""
