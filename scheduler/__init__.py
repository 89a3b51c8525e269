"""When: the engine, its requests and step tasks, the settings, and the command line.

Modules: `settings` and `setting_values` (what an engine is told), `engine`, `requests` and `errors` (the embedded
interface), `verify` (same tokens, whatever is resident), `cli` and `commands` (the command line).
"""
