"""Set-up, data, cluster jobs and benchmarks; each module is run as ``python -m scripts.NAME`` or as
a file.
"""
