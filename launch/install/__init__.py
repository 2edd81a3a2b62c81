"""Sets up a checkout: virtual environment, MPI, and Horovod built for the torch that is there."""
