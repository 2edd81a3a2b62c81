"""`hvdtrain plan`: how fast would N workers be? From latency, bandwidth and compute, no fits.

costs       one exchange of so many bytes, by each method (pure functions)
overlap     a step: gradients become ready during the backward pass, and queue for the exchange
profiles    what a step computes: its phases, and when each gradient is ready
measuring   such a profile, measured here; counting: one from counted operations and a step's time
network     latency and bandwidth, measured by `probe` under horovodrun
predicting  step time and efficiency by N, and the largest useful N
table, plots  the same as text and picture
"""
