"""What a forward is and what is said about it: step clock, counters, log entries, the record of the process.

- `clock`, `statistics`: steps that never nest, and the counters they add up to
- `sink`, `log_file`, `log_stream`, `json_values`: log entries and where they go
- `process`, `process_local`, `at_exit`: what streaming came to in this process, forks, and its end
- `model`: the transformers model and its four forwards
"""
