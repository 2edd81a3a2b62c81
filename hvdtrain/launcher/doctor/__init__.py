"""Checks of this machine and of every host: named, ok / warn / fail, each with its fix.

probe            runs on each host: gathers facts, listens, connects to the other hosts
software         its facts of software, user, paths; and those that take a child process
machine          its facts of the machine: cores, memory, limits, disks
sessions         the launcher's end of a probe, over ssh or as a child process; hosts in parallel
facts            types: the facts of a host, and a finding
checks           facts -> findings: software, users, paths, the way back to the launcher
machine_checks   facts -> findings: cores, memory, disks, GPUs, libraries, clocks
network          TCP between every pair of hosts, and the findings from it
ssh_failures     error output of ssh -> finding
ring             `hvdtrain verify` over all hosts
preflight        the quick part, with which `launch` begins
examination      all checks, and their output as text and JSON
"""
