"""Setup of a checkout: virtual environment, MPI, and Horovod built for the installed torch."""
