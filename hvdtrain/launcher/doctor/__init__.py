"""Checks of this machine and of every host: named, ok / warn / fail, each with its fix.

probe.py        runs on each host: gathers facts, listens, tries the others' addresses
  gathering, machine, children    its facts: of the quick part, of the machine, what takes a process
  reaching, tickets               TCP to the other hosts; what a launch leaves for its agents
sessions.py     the launcher's end of a probe, by ssh or as a child process; hosts in parallel
facts.py        what is known of a host, and what is concluded
checks, machine_checks, network   facts -> findings: software and paths, machines, connections
ssh_failures.py what ssh says, understood
ring.py         `hvdtrain verify` over all hosts
running.py      the quick part, which `launch` begins with;  examining.py: all of it
telling.py      findings for people, and as JSON
"""
