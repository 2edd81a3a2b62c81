"""`hvdtrain report`: plots of runs, and one page that compares them. And the status of a job.

runs         reading of run directories: finished, killed and still running
plots        curves over steps, and time per phase
confusions   a confusion matrix; of many classes, the worst pairs and the worst classes
page         PNG files, and one self-contained HTML file with tables of results and of options
status       of a job that `hvdtrain launch` is running: metrics, and a page that refreshes itself
templates    the HTML that pages share

Nothing here imports torch, so that reports can also be made on machines that cannot train.
"""
