"""What models write besides plain text: reasoning and calls of tools, each in a notation of its own.

`make.py` has what the rest of the program calls; `tables.py` has the notations. One incremental parser (`parser.py`) reads them all.
"""
