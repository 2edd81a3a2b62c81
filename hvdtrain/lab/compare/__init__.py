"""`hvdtrain compare`: the systems of `hvdtrain.lab.systems` on the same work, one after the other.

command     the subcommand: run, print, write
comparing   the plan, and the processes of each system: start, watch, end
rows        the results of one system, compared with those of `single`
table       the rows as text
page        the rows as plots, and on one self-contained page
"""
