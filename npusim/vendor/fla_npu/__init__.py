"""The double of fla_npu, kernels of linear attention that vllm-ascend imports since 0.30.0rc1; none is modelled."""
