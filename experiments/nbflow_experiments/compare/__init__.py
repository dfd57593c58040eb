"""Two sets of measured points, compared number by number with an interval.

=============  ====================================================================================
`selection`    which points: a results folder, perhaps only those with certain settings
`bootstrap`    intervals of differences and ratios, from what was measured more than once
`pairs`        points of both sides that agree in everything else, and their numbers side by side
=============  ====================================================================================
"""
