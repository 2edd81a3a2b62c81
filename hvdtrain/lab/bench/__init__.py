"""Benchmarks: ratios between contestants that take turns.

Machines are noisy: absolute times are shown, but the ratios within a round are the results to
compare; their median and spread are given.

within_job, ring            loops that take turns within one job: step, checkpoint, audit; ring
scaling, scaling_results    jobs that take turns, each while the others are stopped, and their table
peers                       the training loops that `scaling` compares with hvdtrain
start, ddp_script, stamp    the time from a command to its first step
classic                     the textbook comparison of one worker with two
rounds, turns               turns within one job, and turns of jobs
plots                       plots of scaling, start and classic
command                     `hvdtrain bench NAME`: measurement, table, JSON and plots
"""
