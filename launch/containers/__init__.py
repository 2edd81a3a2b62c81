"""Hosts made of containers on this machine: `launch/cluster`."""
