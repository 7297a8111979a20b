"""How models write reasoning and tool calls.

`make.py` has what the rest of the program calls. `tables.py` has the formats. One incremental parser (`parser.py`) reads them all.
"""
