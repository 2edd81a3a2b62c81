"""The sums of our Horovod between threads as ranks, under ThreadSanitizer: see protocols.cpp."""
