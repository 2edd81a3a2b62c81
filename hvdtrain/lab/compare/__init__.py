"""`hvdtrain compare`: the systems of `hvdtrain.lab.systems` on the same work, one after the other.

comparing   what is compared, and the rows that come of it
running     the processes of one system: started, watched, ended
rows        one system's results, held against those of `single`
table       the rows as text
plots, page the rows as pictures, and on one self-contained page
"""
