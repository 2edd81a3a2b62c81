"""Fresh Debian machines, from the README to a hash: `python -m tests.campaigns.machines --help`.

scenarios       what is run: releases, torch, MPI, architectures
steps           the commands of one scenario, and the hash that it ends with
machine         one machine: a folder tree with processes, names and devices of its own
inside          the program that moves a command into it
images          the trees of releases, made by debootstrap and kept
host_settings   the settings of apt, pip, certificates and proxies of this machine, for a fresh one
"""
