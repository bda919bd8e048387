"""xlite_runner: the xlite model runner and its memory profiling, above the vendor's API."""
