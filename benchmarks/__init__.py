"""Benchmarks of hops: `python -m benchmarks` prints medians and ratios. CI times nothing."""
