"""npusim's double of xlite beside the real torch_npu: the published wheels do not fit torch 2.13."""
