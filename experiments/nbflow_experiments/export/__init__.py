"""Tables of a results folder for other programs and for papers.

=============  ====================================================================================
`markup`       Markdown and LaTeX: varying settings and headline metrics, rounded
`data`         CSV, JSON lines and Parquet: all columns, full precision
=============  ====================================================================================
"""
