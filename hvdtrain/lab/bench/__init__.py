"""Benches: ratios between contestants that take turns.

Machines are noisy: absolute times are shown, but the ratios within a round are the results to
compare; their median and spread are given. The command is hvdtrain/cli/bench.py.

turns                      concurrent jobs, each of which computes while the others are stopped
rounds                     contestants one after the other; ratios, and tables of them
jobs                       commands and logged steps
scaling, contestants       workers of one host, beside DDP and the limit of the machine
network                    the same over hosts with links of a chosen speed
within_job                 within one job: step, checkpoint, audit, ring
loops, saving              what it compares: training loops, and processes that save
start, ddp_script, stamp   the time from a command to its first step
peers, peer_runs           one training by several systems, each in its usual form
classic                    the textbook comparison of one worker with two
"""
