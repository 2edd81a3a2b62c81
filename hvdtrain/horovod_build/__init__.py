"""The Horovod that hvdtrain trains with: built here, for the torch of an environment.

edits         what is changed in Horovod's published source, and why; `native/` and `runner/`: files
              of ours that are added
environment   the Python environment that gets it: its torch, its installer, what is refused
requirements  programs and files of the system without which nothing can be built
mpi, cuda     what Horovod is built with, besides torch: Open MPI, CUDA's compiler, NCCL
wheel         what a wheel is built for and with, and the cache of wheels by the hash of that
build         from source to wheel, with progress; an interrupted build is continued
install       `hvdtrain install-horovod`: choose, build, install, check

It uses the standard library alone: launch/setup runs it before anything is installed.
"""
