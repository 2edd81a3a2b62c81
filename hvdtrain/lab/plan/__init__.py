"""`hvdtrain plan`: predicted speed of N workers from latency, bandwidth and compute.

No parameter is fitted to results of training.

command     the subcommand: measure, predict, print, write
costs       seconds of one exchange by method and size (pure functions)
profiles    phases of a step and ready times of its gradients; files; from counted operations
measuring   a profile measured on this machine
network     latency and bandwidth, fitted to timed all-reduces
probe       the program that times all-reduces, under horovodrun
predicting  overlap of backward pass and exchange; step time and efficiency by N; largest useful N
table       predictions as text and plot
"""
