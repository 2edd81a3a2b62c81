"""Measurements, as ratios between loops that are run in turns within one job.

Machines are noisy: absolute times are shown, but what is meant to be compared are the ratios of
neighbouring rounds, of which the median and the spread are given.
"""
