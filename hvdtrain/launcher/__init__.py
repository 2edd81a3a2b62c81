"""What happens around the workers: installing, checking, starting and watching them.

Standard library and layer 0 only: it must run where torch and Horovod are not installed yet.
"""
