"""`hvdtrain plan`: predicted speed of N workers from latency, bandwidth and compute.

No parameter is fitted to results of training.

planning    the subcommand: measure, predict; text, JSON and plot
profiles    phases of a step and ready times of its gradients: from files, measured, or counted
probe       latency and bandwidth: the program that times all-reduces, and the fit
predicting  cost of an exchange, its overlap with the backward pass, efficiency by N
"""
