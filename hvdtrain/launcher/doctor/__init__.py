"""Checks of this machine and of every host: named, ok / warn / fail, each with its fix.

probe.py      runs on each host: gathers facts, listens, tries the others' addresses
gathering     facts of the quick part;  machine: the others;  children: what takes a process
sessions      the launcher's end of a probe, by ssh or as a child process; hosts in parallel
facts.py      what is known of a host, and what is concluded
ssh_failures  what ssh says, understood
checks        facts -> findings, pure functions: software; machine_checks: the rest; network
ring          `hvdtrain verify` over all hosts
running       the quick part (`launch` runs it) and all of it
"""
