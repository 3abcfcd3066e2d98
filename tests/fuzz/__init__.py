"""`python -m tests.fuzz --minutes 20`: everything flopwise reads, damaged at random, through its own command line.

corpus.py  files of every kind that is read, and the command lines that read them
mutate.py  damage: bits, bytes, blocks, cuts, numbers, keys and values of JSON and TOML, words of a command line
case.py    a damaged entry, run in this process within limits of time and memory, and what is wrong with the answer
__main__   workers, each case on disk before it runs; what is found is kept in `found/`, run by `tests/cli/test_fuzz.py`
"""
