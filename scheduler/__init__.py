"""When: the engine, its requests and step tasks, the settings, the command line, and the analysis of logs.

- `engine`, `requests`, `prompts`, `errors`: the embedded interface
- `settings`, `setting_values`, `budgets`, `switches`: what an engine is told
- `opening`, `loading`, `placing`: from a path to everything an engine holds
- `loop`, `generation`, `step_runner`, `step_thread`: requests in their order, and each forward as a step
- `verify`: the same tokens, whatever is resident
- `cli`, `commands`, `report`: the command line, a file for each command, and the reader of logs
"""
