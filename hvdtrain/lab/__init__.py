"""Commands that measure: `bench`, `compare` and `plan`.

bench, compare, plan  a folder for each command
systems               ways to train on N devices, which `compare` runs
peers                 one training, written for each system that `bench peers` compares
hosts                 hosts made of Linux namespaces on this machine
findings              tables, JSON and plots of a measurement, printed and written
"""
