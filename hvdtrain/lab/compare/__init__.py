"""`hvdtrain compare`: the systems of `hvdtrain.lab.systems` on the same work, one after the other.

comparison  the subcommand: check the plan, run every system, print, write
rows        the results of one system, compared with those of `single`, and as text
page        the rows as plots, and on one self-contained page
"""
