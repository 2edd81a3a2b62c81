"""Installing, checking, starting and supervising the workers.

Standard library and layer 0 only: it must run where torch and Horovod are not installed yet.
"""
