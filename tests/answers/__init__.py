"""Answers as models write them, in every notation, each with the parts that it consists of."""
