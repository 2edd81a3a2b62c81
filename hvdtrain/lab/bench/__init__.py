"""Benches: ratios between contestants that take turns.

Machines are noisy: absolute times are shown, but the ratios within a round are the results to
compare; their median and spread are given. The command is hvdtrain/cli/bench.py.

turns                    turns within one job, of commands and of concurrent jobs; ratios, tables
within_job, ring_speed   loops that take turns within one job: step, checkpoint, audit; ring
scaling, contestants     jobs that take turns, each while the others are stopped
start, ddp_script, stamp the time from a command to its first step
classic                  the textbook comparison of one worker with two
"""
