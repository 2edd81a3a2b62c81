"""`hvdtrain report`: what runs have left, as plots and as one page that compares them.

runs        reads run directories: whole ones, killed ones, and those that still go on
canvas      figures without global state; one colour a run, told apart by the colour-blind too
curves      loss, metrics, throughput, learning rate and audits over steps
phases      where a step's time goes
confusion   which class was taken for which
tables      the runs side by side, and the options in which they differ
page        all of it as PNG files and one HTML file that needs nothing else

Nothing here needs torch: a report is also made where no run could be.
"""
