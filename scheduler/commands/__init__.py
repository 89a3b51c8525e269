"""What each command of `expertstream` does, a file each: `generate`, `verify`, `report`, `config` and `demo`.

Around them: `flags` (a flag for every setting), `one_shot` (the event loop and the signals of a command),
`progress` (the loading bar) and `failures` (exit codes and messages).
"""
