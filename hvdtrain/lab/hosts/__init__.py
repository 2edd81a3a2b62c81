"""Hosts on this machine, made of Linux namespaces: for measurements and tests over a network.

network         several hosts on a switch, with links of a chosen speed and SSH between them
node            one host: its namespaces, and processes inside
init, enter     the programs that hold a host, and that move a command into it
"""
