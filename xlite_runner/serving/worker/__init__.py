"""A worker's part of a step: the persistent batch, its inputs, the forward pass, drafts."""
