"""The models that the runner executes without xlite: torch modules of the real architecture on device ``npu``.

The memory profile is the peak of the tensors that these modules make. So the order of their operators, and how long
each local variable keeps a tensor alive, follow vllm-ascend 0.22.1rc1; where a lifetime matters, a comment says so.
"""
