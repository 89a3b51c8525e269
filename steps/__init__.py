"""What a forward is and what is said about it: step clock, counters, log entries, the record of the process.

Names, by module (nothing is imported here, so that a part costs only itself):

- `clock`: `StepClock`, `Step`, `StepRecord`, `StepKind`, `STEP_KINDS`, `NestedStepError`, `OverlappingStepError`
- `statistics`: `Statistics`, `StepsByKind`, `Counters`
- `json_values`: `jsonable`
- `sink`: `LogSink`, `write_final`, `bound_context`, `context_bound`
- `log_file`: `LogFile`; `log_stream`: `LogStream`
- `process`: `streaming_requested`, `not_built`, `next_store_serial`, `register_store`, `StoreLedger`,
  `flush_statistics`
- `process_local`: `ProcessLocal`, `watch_forks`
- `model`: the transformers model and its four forwards
"""
