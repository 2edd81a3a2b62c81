"""`hvdtrain report`: plots of runs, and one page that compares them.

runs        reading of run directories: finished, killed and still running
curves      loss, metrics, throughput, learning rate, audits and time per phase over steps
confusion   confusion matrices
tables      results of the runs side by side, and the options in which they differ
page        PNG files, and one self-contained HTML file

The figures are those of hvdtrain.lab.charts. Nothing here imports torch, so that reports can also
be made on machines that cannot train.
"""
