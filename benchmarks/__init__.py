"""Speed and memory of interp as ratios: `python -m benchmarks` runs all and writes results.md.

Every figure is a ratio of two things that ran alternately in one process, so that a busy machine
slows both; absolute seconds are printed for orientation only. A ratio counts only where both gave
the same numbers.
"""
