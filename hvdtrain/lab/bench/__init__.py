"""Measurements, as ratios between contestants that take turns.

Machines are noisy: absolute times are shown, but what is meant to be compared are the ratios of
neighbouring rounds, of which the median and the spread are given.

rounds, jobs          loops that take turns within one job: step, checkpoint, ring, audit
turns, peers          jobs that take turns, each while the others are stopped: scaling
train_runs, stamp     runs of `hvdtrain train` as a user starts them: scaling, start, classic
"""
