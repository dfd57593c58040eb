"""Comparison of two sets of measured points, metric by metric, with intervals.

=============  ====================================================================================
`selection`    selection of points: a results folder, optionally filtered by settings
`bootstrap`    intervals of differences and ratios, by resampling
`pairs`        pairs of points that agree in all other settings, and their metrics
=============  ====================================================================================
"""
