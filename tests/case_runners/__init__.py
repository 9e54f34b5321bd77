"""How the operations of `tests/data/cases.json` are run on ranks and compared: a `Runner` for each."""
