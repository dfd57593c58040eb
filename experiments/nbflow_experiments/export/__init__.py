"""Tables of a results folder for other programs and for papers.

=============  ====================================================================================
`markup`       Markdown and LaTeX: the settings that vary and the numbers people quote, rounded
`data`         CSV, JSON lines and Parquet: every column, every digit
=============  ====================================================================================
"""
