"""Reads the logs of earlier runs, checks that they reconcile, and says what happened.

- `lines`: bytes to lines to objects, whatever the bytes; `numbers`: which numbers of a sequence were seen
- `counts`: one statistics record; `findings`: violations and damaged lines, each with its place
- `runs`: what is kept of a run and its stores; `entries`: what one entry changes there; `ending`: what shows at the end
- `shapes`: what a run's entries mean; `reading`: `read_logs`; `summary`, `sections` and `text`: what is shown
"""
