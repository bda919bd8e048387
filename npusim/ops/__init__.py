"""The operators: what each allocates, what it computes, what it costs. One module per family."""
