"""Container hosts on this machine: `launch/cluster`."""
